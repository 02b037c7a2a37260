"""The transports of weights from the trainer to rollout workers, by weights.transport.

    shm          shared.py                        memory of one machine: a worker maps it
    collective   plugins/cluster/collective.py    a broadcast by torch.distributed
    rdma         plugins/cluster/rdma.py          each worker reads the trainer's memory

The trainer's process opens a transport, a worker has a `Receiver`. Whatever the transport, a worker
has all bytes of a version in a copy of its own, or a mapping, before it writes the first into its
engine.
"""

import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tandem.choices import Transport
from tandem.registry import find

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.weights.shared import Delta, Layout, SharedWeights


class SharedMemory(Transport):
    """Memory of one machine, which a worker maps."""

    def open(self, tensors: "dict[str, Tensor]", delta: "Delta") -> "SharedWeights":
        from tandem.weights.shared import SharedWeights

        return SharedWeights(tensors, delta)

    def reader(self) -> Callable[..., "dict[str, Tensor]"]:
        return _map_next


def _map_next(
    source: dict[str, Any], layout: "Layout", descriptors: deque[int]
) -> "dict[str, Tensor]":
    """Map the memory of the first descriptor, and close it."""
    from tandem.weights.shared import read_tensors

    descriptor = descriptors.popleft()
    tensors = read_tensors(layout, descriptor, source["names"], source.get("at", 0))
    os.close(descriptor)
    return tensors


class Receiver:
    """The worker's end of every transport."""

    def __init__(self) -> None:
        self._readers: dict[str, Callable[..., dict[str, Tensor]]] = {}

    def receive(
        self, source: dict[str, Any], layout: "Layout", descriptors: deque[int]
    ) -> "dict[str, Tensor]":
        """Return the tensors of an offer; of a delta those alone that the worker lacks, or what
        delta.decode makes them of.

        source: the part of the message that SharedWeights.offer made. layout: of the trainer's
        weights. descriptors: those that came beside messages; shm takes the first, and closes it.
        Raises RuntimeError if the transfer fails: the worker keeps the weights that it has.
        """
        from tandem.weights.shared import offered_layout

        name = source["transport"]
        if name not in self._readers:
            self._readers[name] = find("transports", name, key="weights.transport")().reader()
        return self._readers[name](source, offered_layout(source, layout), descriptors)
