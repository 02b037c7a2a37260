"""Transports of weights between processes, beside shared memory: weights.transport."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tandem.choices import Transport
from tandem.runtime.errors import not_installed

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.config.schema import Config
    from tandem.weights.shared import Delta, SharedWeights


class Collective(Transport):
    """A broadcast by torch.distributed to the workers that load a version at once."""

    stages = True

    def open(self, tensors: "dict[str, Tensor]", delta: "Delta") -> "SharedWeights":
        from tandem.plugins.cluster.collective import CollectiveWeights

        return CollectiveWeights(tensors, delta)

    def reader(self) -> Callable[..., "dict[str, Tensor]"]:
        from tandem.plugins.cluster.collective import receive_broadcast

        return lambda source, layout, descriptors: receive_broadcast(source, layout)


class Rdma(Transport):
    """Each worker reads the trainer's memory by itself (NIXL)."""

    stages = True

    def check(self, config: "Config") -> None:
        if find_spec("nixl") is None:
            raise not_installed("nixl", "rdma", where="weights.transport = rdma")

    def open(self, tensors: "dict[str, Tensor]", delta: "Delta") -> "SharedWeights":
        from tandem.plugins.cluster.rdma import RdmaWeights

        return RdmaWeights(tensors, delta)

    def reader(self) -> Callable[..., "dict[str, Tensor]"]:
        from tandem.plugins.cluster.rdma import Reader

        reader = Reader()
        return lambda source, layout, descriptors: reader.read(source, layout)


class ObjectStore(Transport):
    """Ray's object store. The workers on its nodes read it (rollout_worker.py)."""

    crosses_machines = True

    def conflicts(self, config: "Config") -> Iterator[str]:
        if not config.cluster.nodes:
            yield "weights.transport: ray needs a Ray cluster (cluster.nodes)"
