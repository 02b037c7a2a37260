"""Weight publication by torch.distributed: a broadcast to the workers that load a version at once.

    pool's thread            thread "weights"                        each of the workers
    -------------            ----------------                        -------------------
    offer(v, workers)  --->  joins the group as rank 0    <------>   join it as ranks 1, 2, ...
      a store's address      broadcasts tensor by tensor  ------->   into a staging copy
                             barrier                      <------>   barrier; then they load it

Each offer has a store and a group of its own, so a worker that dies costs one group. The others of
it get an error, or wait JOIN_S for one that died before it came; they keep the version that they
have and are offered the new one again, alone (rollout_workers). Gloo carries it, from and to
memory of the CPU. The store and gloo have no authentication: use them in a network that you trust.
"""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.weights.shared import Delta, Layout, SharedWeights, Target, read_tensors

HOST = "127.0.0.1"
JOIN_S = 15.0  # for every process of a group to come: they are idle when they are told to
TENSOR_S = timedelta(seconds=300)  # for each tensor


class CollectiveWeights(SharedWeights):
    """SharedWeights that are broadcast to workers of this machine."""

    def __init__(self, tensors: dict[str, Tensor], delta: Delta = False, join_s: float = JOIN_S):
        super().__init__(tensors, delta)
        self._join_s = join_s
        self._senders: list[threading.Thread] = []

    def offer(self, version: int, workers: Sequence[Target]) -> list[tuple[dict[str, Any], int]]:
        """Begin a broadcast of a version to some workers; as SharedWeights.offer."""
        if not workers:
            return []
        sent, size = self.sent(version, workers), len(workers) + 1
        descriptor = self.descriptor(version)
        tensors = read_tensors(sent.layout, descriptor, sent.names, sent.at)
        os.close(descriptor)
        timeout = timedelta(seconds=self._join_s)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            HOST, 0, is_master=True, wait_for_workers=False, timeout=timeout
        )
        sender = threading.Thread(
            target=self._send, args=(store, size, tensors), name="weights", daemon=True
        )
        self._senders = [thread for thread in self._senders if thread.is_alive()] + [sender]
        sender.start()
        place = {"port": store.port, "size": size, "join_s": self._join_s}
        messages = [self._message("collective", version, sent) for _ in workers]
        return [({**m, **place, "rank": i}, -1) for i, m in enumerate(messages, start=1)]

    def close(self) -> None:
        """Forget all of them, after the broadcasts under way."""
        for sender in self._senders:
            sender.join(self._join_s)
        super().close()

    def _send(self, store: Any, size: int, tensors: dict[str, Tensor]) -> None:
        with suppress(RuntimeError):  # a worker was lost, and the others tell the pool
            _broadcast(store, 0, size, self._join_s, tensors)


def receive_broadcast(source: dict[str, Any], layout: Layout) -> dict[str, Tensor]:
    """Take part in a broadcast as a worker; return the tensors. Raises RuntimeError if another
    process of the group is lost."""
    join_s = source["join_s"]
    timeout = timedelta(seconds=join_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        HOST, source["port"], is_master=False, timeout=timeout
    )
    _, tensors = layout.only(source["names"]).staging()
    _broadcast(store, source["rank"], source["size"], join_s, tensors)
    return tensors


def _broadcast(store: Any, rank: int, size: int, join_s: float, tensors: dict[str, Tensor]) -> None:
    """Broadcast tensors in place from rank 0 of a new group."""
    gloo: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=join_s))
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, TENSOR_S
    for tensor in tensors.values():
        gloo.broadcast([tensor.reshape(-1).view(torch.uint8)], options).wait()
    gloo.barrier().wait()
