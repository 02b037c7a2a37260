"""The nodes of a Ray cluster as the place of a run's workers and ranks: cluster.nodes > 0."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.choices import ENGINE, Report, engine_of, stream_of, transport_of
from tandem.config.schema import Config
from tandem.jobs.here import Here
from tandem.runtime.errors import not_installed
from tandem.runtime.place import Place

if TYPE_CHECKING:
    from tandem.plugins.cluster.ray_cluster import RayCluster


class Nodes(Here):
    """A Ray cluster. What the config leaves on the driver's machine is there."""

    shares_files = False
    usual_transport = "ray"
    cluster: "RayCluster"  # of `open`

    def describe(self, config: Config) -> str:
        return f"{config.cluster.nodes} Ray nodes"

    def conflicts(self, config: Config) -> Iterator[str]:
        cluster, rollout = config.cluster, config.rollout
        on_ray = cluster.trainers == "ray"
        if on_ray and config.parallel.processes == 1:
            yield "cluster.trainers: ray starts the ranks after 0, and [parallel] has one process"
        calls = cluster.reward_workers + cluster.env_workers
        if not (rollout.workers or stream_of(config).needs_nodes or on_ray or calls):
            yield (
                "cluster.nodes: rollout workers run on them, and rollout.workers=0 has none; e.g. "
                f"rollout.workers={cluster.nodes}"
            )
        if cluster.env_workers and config.env.name == "single_turn":
            yield "cluster.env_workers: has no effect on env.name=single_turn, which does nothing"
        if not engine_of(config).on_nodes:
            yield f"{ENGINE}: on a Ray cluster (cluster.nodes) only tandem runs"
        if rollout.devices:
            yield (
                "rollout.devices: on a Ray cluster (cluster.nodes) Ray gives each worker its device"
            )
        if not transport_of(config).crosses_machines:
            name = config.weights.transport
            needed = "cluster.nodes need ray or collective"
            yield f"weights.transport: {name} is of one machine, and {needed}"

    def check(self, config: Config) -> None:
        from tandem.plugins.cluster.this_machine import require_listener

        if find_spec("ray") is None:
            raise not_installed("ray", "ray", where="cluster.nodes", instead="cluster.nodes=0")
        if config.cluster.address:
            require_listener(config.cluster.address)

    def own_place(self, config: Config, place: Place) -> Place:
        """Return a place alone: Ray shows each process its own GPU."""
        by_ray = config.cluster.trainers == "ray"
        return replace(place, local_rank=0, local_size=1) if by_ray else place

    def check_ranks(self, config: Config) -> None:
        if config.cluster.trainers == "driver":
            super().check_ranks(config)

    @contextmanager
    def open(self, config: Config, folder: Path, *, only_ranks: bool = False) -> Iterator[Here]:
        """Start or join the cluster. folder: of the run, which gets the logs of its processes.
        Raises UserError."""
        if only_ranks and config.cluster.trainers == "driver":
            yield Here()
            return
        from tandem.jobs.models import placement
        from tandem.plugins.cluster.logs import LogFiles
        from tandem.plugins.cluster.ray_cluster import join_cluster, start_cluster

        nodes, gpus = config.cluster.nodes, int(placement(config).device.type == "cuda")
        if config.cluster.address:
            opened = join_cluster(config.cluster.address, nodes, gpus)
        else:
            opened = start_cluster(nodes, _object_bytes(config), gpus)
        with opened as running:
            running.place(config.cluster.placement)
            running.logs = LogFiles(folder / "workers")
            self.cluster = running
            yield self

    def worker_devices(self, device: str, ranks: int) -> list[str]:
        """Return the kind alone: Ray shows each worker its own GPU, whatever its number."""
        return [device.partition(":")[0]]

    @contextmanager
    def open_weights(self, config: Config, tensors: Any) -> Iterator[tuple[Any, Any]]:
        opened = transport_of(config).open_on(self.cluster, tensors, config.weights.delta)
        with closing(opened) as weights:
            yield weights, self.cluster.spawn

    @contextmanager
    def open_envs(self, config: Config, local: Any, report: Report) -> Iterator[Any]:
        if not config.cluster.env_workers:
            with closing(local):
                yield local
            return
        from tandem.plugins.cluster.env_actors import EnvActors, EnvWorker, RemoteCaller

        actors = EnvActors(
            self.cluster.for_calls(EnvWorker).spawn,
            env=config.env.model_dump(mode="json"),
            sandbox=config.sandbox.model_dump(),
            folder=os.getcwd(),
            most=config.cluster.env_workers,
            heartbeat_s=config.run.stall_s / 2,
            report=report,
        )
        pool = replace(local, make=actors.make, caller=RemoteCaller, status=actors.status)
        with actors, closing(pool):
            yield pool

    @contextmanager
    def open_rewards(self, config: Config, local: Any, report: Report) -> Iterator[Any]:
        if not config.cluster.reward_workers:
            yield local
            return
        from tandem.jobs.engines import pool_arguments
        from tandem.plugins.cluster.node_pool import RewardActors, RewardWorker

        local.close()
        with RewardActors(
            self.cluster.for_calls(RewardWorker).spawn,
            pool=pool_arguments(config),
            folder=os.getcwd(),
            most=config.cluster.reward_workers,
            heartbeat_s=config.run.stall_s / 2,
            report=report,
        ) as pool:
            yield pool

    @contextmanager
    def start_ranks(
        self, config: Config, command: Sequence[str], place: Place, report: Report
    ) -> Iterator[tuple[Callable[..., Any], Place]]:
        if config.cluster.trainers == "driver":
            with super().start_ranks(config, command, place, report) as started:
                yield started
            return
        from tandem.plugins.cluster.trainer_ranks import TrainerRanks

        ranks = TrainerRanks(self.cluster, command, place.size - 1, report)
        with closing(ranks) as others:
            yield others.start, others.meet(place)


def _object_bytes(config: Config) -> int:
    """Return the room for weights in a node's store: the versions that are kept, one on its way,
    and one that a worker still loads; of each what changed, too."""
    if not config.rollout.workers:
        return 0
    from tandem.jobs.models import placement
    from tandem.model.config_file import check_model
    from tandem.model.load import empty_model

    path, width = config.model.path, placement(config).dtype.itemsize
    module = empty_model(path, check_model(path))
    count = sum(parameter.numel() for parameter in module.parameters())
    versions = (config.rollout.staleness + 3) * (1 + bool(config.weights.delta))
    return versions * count * width
