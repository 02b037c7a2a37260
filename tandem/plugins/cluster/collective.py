"""Weight publication by torch.distributed: a broadcast to the workers that load a version at once.

    pool's thread            thread "weights"                        each of the workers
    -------------            ----------------                        -------------------
    offer(v, workers)  --->  joins the group as rank 0    <------>   join it as ranks 1, 2, ...
      a store's address      broadcasts bucket by bucket  ------->   into a staging copy
                             barrier                      <------>   barrier; then they load it

Each offer has a store and a group of its own, so a worker that dies costs one group. The others of
it get an error, or wait JOIN_S for one that died before it came, with NCCL up to NCCL_S; they keep
the version that they have and are offered the new one again, alone (rollout_workers). Gloo carries
it between memories of CPUs, NCCL between GPUs, of which each process has its own; gloo then still
finds out who has come. None has authentication: use them in a network that you trust.
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.plugins.cluster.device_weights import DeviceWeights
from tandem.plugins.cluster.this_machine import environment
from tandem.weights.shared import Delta, Layout, Sent, SharedWeights, Target, chosen

HOST = "127.0.0.1"
JOIN_S = 15.0  # for every process of a group to come: they are idle when they are told to
BUCKET = 1 << 26  # bytes of one broadcast
BUCKET_S = timedelta(seconds=300)  # for each of them
NCCL_S = 60.0  # for all of them between GPUs, and for NCCL to begin
# NCCL's watchdog would end the trainer's process with a worker's: it cleans up only
CLEAN_UP = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}


class CollectiveWeights(SharedWeights):
    """SharedWeights that are broadcast. host: the address of this machine for the workers."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        delta: Delta = False,
        *,
        host: str = HOST,
        join_s: float = JOIN_S,
    ):
        super().__init__(tensors, delta)
        self._host, self._join_s = host, join_s
        self._senders: list[threading.Thread] = []

    def offer(self, version: int, workers: Sequence[Target]) -> list[tuple[dict[str, Any], int]]:
        """Begin a broadcast of a version to some workers; as SharedWeights.offer."""
        if not workers:
            return []
        sent, size = self.sent(version, workers), len(workers) + 1
        with self._lock:
            memory = self._published[version].mapped[sent.at :]
        timeout = timedelta(seconds=self._join_s)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            self._host, 0, is_master=True, wait_for_workers=False, timeout=timeout
        )
        sender = threading.Thread(
            target=self._send, args=(store, size, memory, sent), name="weights", daemon=True
        )
        self._senders = [thread for thread in self._senders if thread.is_alive()] + [sender]
        sender.start()
        place = {"host": self._host, "port": store.port, "size": size, "join_s": self._join_s}
        place |= {"device": memory.device.type}
        messages = [self._message("collective", version, sent) for _ in workers]
        return [({**m, **place, "rank": i}, -1) for i, m in enumerate(messages, start=1)]

    def close(self) -> None:
        """Forget all of them, after the broadcasts under way."""
        for sender in self._senders:
            sender.join(self._join_s)
        super().close()

    def _send(self, store: Any, size: int, memory: Tensor, sent: Sent) -> None:
        # a worker was lost, and the others tell the pool
        with suppress(RuntimeError), _own_stream(memory.device):
            if sent.names is not None:  # what changed, one behind the other
                whole = chosen(sent.layout, memory, sent.names)
                memory, parts = sent.only.staging(memory.device)
                for name, part in parts.items():
                    part.copy_(whole[name])
            broadcast(store, 0, size, self._join_s, memory[: sent.only.size])


class DeviceBroadcasts(CollectiveWeights, DeviceWeights):
    """CollectiveWeights that stay on the trainer's GPU until NCCL takes them."""


def receive_broadcast(source: dict[str, Any], layout: Layout) -> dict[str, Tensor]:
    """Take part in a broadcast as a worker; return the tensors. Raises RuntimeError if another
    process of the group is lost."""
    join_s = source["join_s"]
    timeout = timedelta(seconds=join_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        source["host"], source["port"], is_master=False, timeout=timeout
    )
    with _own_stream(torch.device(source["device"])):
        memory, tensors = layout.only(source["names"]).staging(source["device"])
        broadcast(store, source["rank"], source["size"], join_s, memory)
    return tensors


def _own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Enter a stream where no kernel of the trainer or an engine waits for a worker's."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def broadcast(store: Any, rank: int, size: int, join_s: float, memory: Tensor) -> None:
    """Broadcast memory, uint8 [bytes], in place from rank 0 of a new group. Raises RuntimeError if
    not all come or one is lost."""
    gloo: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=join_s))
    if memory.is_cuda:
        own = dist.PrefixStore("nccl", store)  # type: ignore[attr-defined]
        _by_nccl(own, rank, size, memory, torch.cuda.current_stream())
    else:
        _send_buckets(gloo, memory)
    gloo.barrier().wait()


def _send_buckets(group: Any, memory: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, BUCKET_S
    for bucket in memory.split(BUCKET) if len(memory) else ():
        group.broadcast([bucket], options).wait()


def _by_nccl(store: Any, rank: int, size: int, memory: Tensor, stream: Any) -> None:
    """Broadcast between GPUs, in a thread that is left behind if it has not ended in NCCL_S: NCCL
    itself waits for a lost process for ever."""
    make: Any = dist.ProcessGroupNCCL
    with environment(CLEAN_UP):
        group = make(store, rank, size, BUCKET_S)
    wrong = [f"no end in {NCCL_S:g} s"]

    def send() -> None:
        try:
            with torch.cuda.stream(stream):
                _send_buckets(group, memory)
                stream.synchronize()
            wrong.clear()
        except RuntimeError as error:
            wrong[:] = [f"{error}"]

    sender = threading.Thread(target=send, name="weights by NCCL", daemon=True)
    sender.start()
    sender.join(NCCL_S)
    if wrong:
        group.abort()
        raise RuntimeError(f"a broadcast by NCCL: {wrong[0]}")
    group.shutdown()
