"""The transports of weights from the trainer to rollout workers, by weights.transport.

    shm          shared.py       memory of one machine: a worker maps it
    collective   collective.py   a broadcast by torch.distributed
    rdma         rdma.py         each worker reads the trainer's memory

The trainer's process has `open_weights`, a worker a `Receiver`. Whatever the transport, a worker
has all bytes of a version in a copy of its own, or a mapping, before it writes the first into its
engine.
"""

import os
from collections import deque
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tandem.weights.shared import Delta, Layout, SharedWeights, offered_layout, read_tensors

if TYPE_CHECKING:
    from tandem.plugins.cluster.rdma import Reader


def open_weights(transport: str, tensors: dict[str, Tensor], delta: Delta) -> SharedWeights:
    """Open the publisher of a transport. Raises UserError if its library is missing."""
    match transport:
        case "collective":
            from tandem.plugins.cluster.collective import CollectiveWeights

            return CollectiveWeights(tensors, delta)
        case "rdma":
            from tandem.plugins.cluster.rdma import RdmaWeights

            return RdmaWeights(tensors, delta)
        case "auto" | "shm":
            return SharedWeights(tensors, delta)
        case _:
            raise ValueError(f"no such transport: {transport}")


class Receiver:
    """The worker's end of every transport."""

    def __init__(self) -> None:
        self._reader: Reader | None = None  # of rdma, from its first use on

    def receive(
        self, source: dict[str, Any], layout: Layout, descriptors: deque[int]
    ) -> dict[str, Tensor]:
        """Return the tensors of an offer; of a delta those alone that the worker lacks, or what
        delta.decode makes them of.

        source: the part of the message that SharedWeights.offer made. layout: of the trainer's
        weights. descriptors: those that came beside messages; shm takes the first, and closes it.
        Raises RuntimeError if the transfer fails: the worker keeps the weights that it has.
        """
        layout = offered_layout(source, layout)
        match source["transport"]:
            case "shm":
                descriptor = descriptors.popleft()
                tensors = read_tensors(layout, descriptor, source["names"], source.get("at", 0))
                os.close(descriptor)
                return tensors
            case "collective":
                from tandem.plugins.cluster.collective import receive_broadcast

                return receive_broadcast(source, layout)
            case "rdma":
                from tandem.plugins.cluster.rdma import Reader

                self._reader = self._reader or Reader()
                return self._reader.read(source, layout)
            case other:
                raise ValueError(f"no such transport: {other}")
