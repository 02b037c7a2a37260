"""The transports of weights from the trainer to rollout workers, by weights.transport.

    shm          shared.py                           memory of one machine: a worker maps it
    cuda_ipc     plugins/cluster/device_weights.py   memory of the trainer's GPU: as shm
    collective   plugins/cluster/collective.py       a broadcast by torch.distributed
    rdma         plugins/cluster/rdma.py             each worker reads the trainer's memory

The trainer's process opens a transport, a worker has `receive_offers`. Whatever the transport, a
worker has all bytes of a version in a copy of its own, or a mapping, before it writes the first
into its engine.
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


def receive_offers(layout: "Layout") -> Callable[[dict[str, Any], deque[int]], "dict[str, Tensor]"]:
    """Make the worker's end of every transport. layout: of the trainer's weights.

    It takes the part of a message that SharedWeights.offer made, and the descriptors that came
    beside messages, of which shm takes the first, and closes it. It returns the tensors of the
    offer; of a delta those alone that the worker lacks, or what delta.decode makes them of. It
    raises RuntimeError if the transfer fails: the worker keeps the weights that it has.
    """
    from tandem.weights.shared import offered_layout

    readers = dict[str, Callable[..., Any]]()

    def receive(source: dict[str, Any], descriptors: deque[int]) -> "dict[str, Tensor]":
        name = source["transport"]
        if name not in readers:
            readers[name] = find("transports", name, key="weights.transport")().reader()
        return readers[name](source, offered_layout(source, layout), descriptors)

    return receive
