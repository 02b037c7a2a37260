"""Weights that stay on the trainer's GPU until a worker has them: weights.transport = "cuda_ipc".

    trainer's thread                pool's thread                  each worker of this machine
    ----------------                -------------                  ---------------------------
    publish(v): copy and digest -->  offer(v): a handle of    -->   opens the handle, copies into
      on the GPU                       the memory (CUDA IPC)          its model, and digests that

Of each tensor only the 16 bytes of a digest leave the GPU, but for weights.delta = "elements",
which the CPU finds. Memory of a version is as in weights/shared.py: a released one is written
again, and freed at the end alone. No GPU has run this.
"""

import base64
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.weights.hashing import device_digest, tensor_digests
from tandem.weights.shared import Delta, Layout, Memory, SharedWeights, Target, chosen


class DeviceWeights(SharedWeights):
    """SharedWeights in memory of the tensors' device."""

    digest = "device"

    def __init__(self, tensors: dict[str, Tensor], delta: Delta = False):
        super().__init__(tensors, delta)
        self._device = next(iter(tensors.values())).device

    def _copy(
        self, layout: Layout, tensors: Mapping[str, Tensor], memory: Tensor
    ) -> dict[str, str]:
        copies = dict(layout.views(memory))
        for name, copy in copies.items():
            copy.copy_(tensors[name])
        return tensor_digests(copies, device_digest)

    def _new_memory(self) -> Memory:
        return Memory(-1, torch.empty(self._room, dtype=torch.uint8, device=self._device))

    def _end_memory(self, memory: Memory) -> None:
        """Leave it to torch."""


class IpcWeights(DeviceWeights):
    """DeviceWeights that workers of the same machine read by CUDA IPC."""

    def offer(self, version: int, workers: Sequence[Target]) -> list[tuple[dict[str, Any], int]]:
        """Give each worker a handle of a version's memory; as SharedWeights.offer."""
        offers = []
        for worker in workers:
            message = self._message("cuda_ipc", version, self.sent(version, [worker]))
            with self._lock:
                memory = self._published[version].mapped
            handle = share(memory)
            offers.append(({**message, "gpu": gpu_id(self._device), "handle": handle}, -1))
        return offers


def share(memory: Tensor) -> list[Any]:
    """Return what another process opens a GPU's memory by, for one opening; bytes as base64."""
    storage = memory.untyped_storage()
    # torch keeps a counter of readers for each opening as long as the storage lives
    alias: Any = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), storage.device, storage.nbytes()
    )
    parts = alias._share_cuda_()[1:]
    return [base64.b64encode(p).decode() if isinstance(p, bytes) else p for p in parts]


def attach(number: int, handle: list[Any]) -> Tensor:
    """Open what `share` returned on the GPU of that number: uint8 [size], the same memory."""
    parts = [base64.b64decode(part) if isinstance(part, str) else part for part in handle]
    storage = torch.UntypedStorage._new_shared_cuda(number, *parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def gpu_id(device: torch.device) -> str:
    """Return what a GPU is called in every process, whatever its number there."""
    return str(torch.cuda.get_device_properties(device).uuid)


def open_offer(source: dict[str, Any], layout: Layout, _: deque[int]) -> dict[str, Tensor]:
    """Return the tensors of an offer, in the trainer's memory. Raises RuntimeError if this process
    does not see its GPU."""
    found = [gpu_id(torch.device("cuda", n)) for n in range(torch.cuda.device_count())]
    if source["gpu"] not in found:
        raise RuntimeError(
            f"cuda_ipc reads the trainer's memory on GPU {source['gpu']}, and this worker sees "
            f"{', '.join(found) or 'none'}; weights.transport=shm needs no common GPU"
        )
    memory = attach(found.index(source["gpu"]), source["handle"])
    return chosen(layout, memory[source.get("at", 0) :], source["names"])
