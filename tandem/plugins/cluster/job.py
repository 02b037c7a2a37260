"""The Ray cluster of a run; hosts of rollout workers, there or on this machine, and their number
(`tandem scale`)."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from tandem.config.schema import Config
from tandem.engine.worker_pool.client import PoolThread
from tandem.engine.worker_pool.pool import Workers
from tandem.engine.worker_pool.process import Spawn
from tandem.jobs.models import placement, rests_in_updates
from tandem.plugins.cluster.errors import no_ray
from tandem.plugins.cluster.rdma import no_nixl
from tandem.plugins.cluster.this_machine import require_listener
from tandem.plugins.vllm import worker as vllm_worker
from tandem.registry import find
from tandem.run_folder.status import take_requested_workers
from tandem.runtime.errors import UserError
from tandem.stream.errors import no_transfer_queue
from tandem.types import Sync
from tandem.weights.shared import SharedWeights
from tandem.weights.transports import open_weights

if TYPE_CHECKING:
    from tandem.plugins.cluster.ray_cluster import RayCluster


def check_cluster(config: Config) -> None:
    """Check before models are loaded that the packages of others, and the cluster, are there.
    Raises UserError."""
    if config.stream.kind == "transfer_queue":
        for package in ("ray", "transfer_queue"):
            if find_spec(package) is None:
                raise no_transfer_queue(package)
    if config.weights.transport == "rdma" and find_spec("nixl") is None:
        raise no_nixl("no nixl")
    if config.rollout.engine == "vllm":
        if rests_in_updates(config) and placement(config).device.type == "cpu":
            raise UserError(
                "vLLM does not sleep on a CPU",
                where="rollout.release_cache",
                found="true, with rollout.engine = vllm on a CPU",
                expected="a GPU, whose memory vLLM can give to the update",
                next="rollout.release_cache=auto",
            )
        vllm_worker.find_python()
    if config.cluster.nodes:
        if find_spec("ray") is None:
            raise no_ray()
        if config.cluster.address:
            require_listener(config.cluster.address)


def worker_device(config: Config, device: str) -> str:
    """Return the device of a rollout worker. device: the trainer's, e.g. "cuda:3"; Ray shows each
    worker its own GPU alone, whatever its number."""
    return device.partition(":")[0] if config.cluster.nodes else device


@contextmanager
def open_cluster(config: Config, folder: Path) -> Iterator["RayCluster | None"]:
    """Start or join the config's Ray cluster; yields None without one. folder: of the run, which
    gets the logs of its processes. Raises UserError."""
    if not config.cluster.nodes:
        yield None
        return
    from tandem.plugins.cluster.logs import LogFiles
    from tandem.plugins.cluster.ray_cluster import join_cluster, start_cluster

    nodes, gpus = config.cluster.nodes, int(placement(config).device.type == "cuda")
    if config.cluster.address:
        opened = join_cluster(config.cluster.address, nodes, gpus)
    else:
        opened = start_cluster(nodes, _object_bytes(config), gpus)
    with opened as running:
        running.place(config.cluster.placement)
        with closing(LogFiles(running.listener.address[0], folder / "workers")) as running.logs:
            yield running


def _object_bytes(config: Config) -> int:
    """Return the room for weights in a node's store: the versions that are kept, one on its way,
    and one that a worker still loads; of each what changed, too."""
    if not config.rollout.workers:
        return 0
    sizes = find("resources", "sizes", key="cluster")(config, "train")
    versions = (config.rollout.staleness + 3) * (1 + bool(config.weights.delta))
    return int(versions * sizes.policy * sizes.place.dtype.itemsize)


@contextmanager
def open_hosts(
    config: Config, tensors: dict[str, Tensor], cluster: "RayCluster | None"
) -> Iterator[tuple[SharedWeights, Spawn | None]]:
    """Open what rollout workers run on, and the transport of weights to them; yields both, None
    for processes of this machine. tensors: of a version of the weights."""
    way = config.weights
    if cluster is None:
        with closing(open_weights(way.transport, tensors, way.delta)) as weights:
            yield weights, None
    else:
        with closing(cluster.open_weights(tensors, way.delta)) as weights:
            yield weights, cluster.spawn


class ScaleOnRequest:
    """A Sync that first has workers join or leave, as `tandem scale` has asked for: before a step's
    rollouts. Requests of other steps may be under way; those of workers that leave are served
    again."""

    def __init__(
        self, sync: Sync, workers: Workers | PoolThread, folder: Path, report: Callable[[str], None]
    ):
        self.sync, self.workers, self.folder, self.report = sync, workers, folder, report
        self.publish, self.traffic = sync.publish, sync.traffic
        self.logprob_gap = sync.logprob_gap

    def sync_to(self, version: int) -> None:
        wanted = take_requested_workers(self.folder)
        if wanted and wanted != self.workers.count:
            self.report(
                f"rollout workers: {self.workers.count} -> {wanted}, as `tandem scale` asks"
            )
            self.workers.resize(wanted)
        self.sync.sync_to(version)
