"""Environments of a run: in this process, or in actors on the nodes of a Ray cluster."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from tandem.config.schema import Config
from tandem.plugins.cluster.env_actors import EnvActors, RemoteCaller
from tandem.plugins.cluster.env_worker import EnvWorker
from tandem.rollout.env_pool import EnvPool

if TYPE_CHECKING:
    from tandem.plugins.cluster.ray_cluster import RayCluster


@contextmanager
def open_env_workers(
    config: Config, cluster: "RayCluster | None", local: EnvPool, report: Callable[[str], None]
) -> Iterator[EnvPool]:
    """Open env workers on a cluster; yields the environments of this process, which has found out
    that they can be made, if the config has none."""
    if cluster is None or not config.cluster.env_workers:
        with closing(local):
            yield local
        return
    with closing(cluster.for_calls(EnvWorker)) as nodes:
        actors = EnvActors(
            nodes.spawn,
            env=config.env.model_dump(mode="json"),
            sandbox=config.sandbox.model_dump(),
            folder=os.getcwd(),
            most=config.cluster.env_workers,
            heartbeat_s=config.run.stall_s / 2,
            report=report,
        )
        pool = EnvPool(
            make=actors.make, limits=config.env, caller=RemoteCaller, status=actors.status
        )
        with actors, closing(pool):
            yield pool
