"""Hosts of rollout workers, this machine or a Ray cluster, and their number (`tandem scale`)."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

from tandem.cluster.errors import no_ray
from tandem.cluster.this_machine import require_listener
from tandem.config.schema import Config
from tandem.engine.worker_pool.client import PoolThread
from tandem.engine.worker_pool.pool import Workers
from tandem.engine.worker_pool.process import Spawn
from tandem.run_folder.status import take_wish
from tandem.types import Sync
from tandem.weights.shared import Layout, SharedWeights
from tandem.weights.transports import open_weights


def check_cluster(config: Config) -> None:
    """Check what can be checked before models are loaded. Raises UserError."""
    if config.cluster.nodes:
        if find_spec("ray") is None:
            raise no_ray()
        if config.cluster.address:
            require_listener(config.cluster.address)


@contextmanager
def open_hosts(
    config: Config, tensors: dict[str, Tensor], device: str
) -> Iterator[tuple[SharedWeights, Spawn | None]]:
    """Open what rollout workers run on, and the transport of weights to them; yields both, None
    for processes of this machine. tensors: of a version of the weights."""
    cluster = config.cluster
    if not cluster.nodes:
        way = config.weights
        with closing(open_weights(way.transport, tensors, way.delta)) as weights:
            yield weights, None
        return
    from tandem.cluster.ray_cluster import RayWeights, join_cluster, start_cluster

    gpus = int(device.startswith("cuda"))
    # the versions that are kept, one on its way, and one that a worker still loads
    room = (config.rollout.staleness + 3) * Layout.of(tensors).size
    opened = (
        join_cluster(cluster.address, cluster.nodes, gpus)
        if cluster.address
        else start_cluster(cluster.nodes, room, gpus)
    )
    with opened as running, closing(RayWeights(tensors, config.weights.delta)) as weights:
        yield weights, running.spawn


class ScaleOnWish:
    """A Sync that first has workers join or leave, as `tandem scale` has asked for: before a step's
    rollouts. Requests of other steps may be under way; those of workers that leave are served
    again."""

    def __init__(
        self, sync: Sync, workers: Workers | PoolThread, folder: Path, report: Callable[[str], None]
    ):
        self.sync, self.workers, self.folder, self.report = sync, workers, folder, report
        self.publish, self.logprob_gap = sync.publish, sync.logprob_gap
        take_wish(folder)  # it was for the run before

    def sync_to(self, version: int) -> int:
        wanted = take_wish(self.folder)
        if wanted and wanted != self.workers.count:
            self.report(
                f"rollout workers: {self.workers.count} -> {wanted}, as `tandem scale` asks"
            )
            self.workers.resize(wanted)
        return self.sync.sync_to(version)
