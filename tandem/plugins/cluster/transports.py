"""Transports of weights between processes, beside shared memory: weights.transport."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tandem.choices import Transport
from tandem.runtime.errors import UserError, not_installed

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.config.schema import Config
    from tandem.plugins.cluster.ray_cluster import RayCluster
    from tandem.weights.shared import Delta, SharedWeights


class CudaIpc(Transport):
    """Memory of the trainer's GPU, which workers of the same machine open."""

    memory = "the trainer's GPU"

    def check(self, config: "Config") -> None:
        from tandem.jobs.models import placement

        if (device := placement(config).device).type != "cuda":
            raise UserError(
                "weights.transport = cuda_ipc reads the memory of a GPU",
                where="model.device",
                found=f"{config.model.device}, which is {device}",
                expected="a model on a CUDA device",
                next="leave weights.transport out: shm is for any device",
            )

    def open(self, tensors: "dict[str, Tensor]", delta: "Delta") -> "SharedWeights":
        from tandem.plugins.cluster.device_weights import IpcWeights

        return IpcWeights(tensors, delta)

    def reader(self) -> Callable[..., "dict[str, Tensor]"]:
        from tandem.plugins.cluster.device_weights import open_offer

        return open_offer


class Collective(Transport):
    """A broadcast by torch.distributed to the workers that load a version at once."""

    crosses_machines = True
    stages = True

    def check(self, config: "Config") -> None:
        from tandem.engine.dispatch import devices_of
        from tandem.jobs.models import placement
        from tandem.model.placement import place_models

        own, rollout = placement(config).device, config.rollout
        if own.type != "cuda" or config.cluster.nodes:
            return
        devices = [str(place_models(name, "auto").device) for name in rollout.devices or [str(own)]]
        workers = range(rollout.workers)
        places = [devices_of(number, rollout.tensor_parallel, devices) for number in workers]
        used = [str(own), *(place.partition(",")[0] for place in places)]
        if "cpu" in used or len(set(used)) < len(used):
            raise UserError(
                "NCCL broadcasts between processes that have a GPU each",
                where="weights.transport = collective",
                found=f"the trainer and its workers on {', '.join(used)}",
                expected="a GPU for the trainer, and another for each worker",
                next="name them in rollout.devices, or set weights.transport=cuda_ipc",
            )

    def open(self, tensors: "dict[str, Tensor]", delta: "Delta", **where: Any) -> "SharedWeights":
        from tandem.plugins.cluster.collective import CollectiveWeights, DeviceBroadcasts

        on_gpu = next(iter(tensors.values())).is_cuda
        return (DeviceBroadcasts if on_gpu else CollectiveWeights)(tensors, delta, **where)

    def open_on(
        self, cluster: "RayCluster", tensors: "dict[str, Tensor]", delta: "Delta"
    ) -> "SharedWeights":
        return self.open(tensors, delta, host=cluster.own_address())

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

    def open_on(
        self, cluster: "RayCluster", tensors: "dict[str, Tensor]", delta: "Delta"
    ) -> "SharedWeights":
        """Open the publisher for workers on the nodes of a cluster."""
        return cluster.open_weights(tensors, delta)

    def conflicts(self, config: "Config") -> Iterator[str]:
        if not config.cluster.nodes:
            yield "weights.transport: ray needs a Ray cluster (cluster.nodes)"
