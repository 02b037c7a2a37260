"""Reward workers of a run: a RewardPool of this machine, or actors on the nodes of a Ray
cluster."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from tandem.config.schema import Config
from tandem.plugins.cluster.reward_actors import RewardActors
from tandem.plugins.cluster.reward_worker import RewardWorker
from tandem.registry import find
from tandem.rewards.pool.pool import RewardPool, TaskPool

if TYPE_CHECKING:
    from tandem.plugins.cluster.ray_cluster import RayCluster


def build_reward_pool(config: Config) -> RewardPool:
    """Build the pool of reward workers; raises UserError if `code` is scored and there is no
    sandbox."""
    if "code" in config.reward.functions:
        find("sandboxes", config.sandbox.kind, key="sandbox")(config.sandbox)
    return RewardPool(**_arguments(config))


def _arguments(config: Config) -> dict[str, Any]:
    reward, options = config.reward, dict(config.reward.options)
    if "code" in reward.functions:
        options["code"] = {**options.get("code", {}), "sandbox": config.sandbox.model_dump()}
    return {
        "functions": reward.functions,
        "timeout_s": reward.timeout_s,
        "workers": reward.workers,
        "weights": reward.weights,
        "options": options,
    }


@contextmanager
def open_reward_workers(
    config: Config, cluster: "RayCluster | None", local: RewardPool, report: Callable[[str], None]
) -> Iterator[TaskPool]:
    """Open reward workers on a cluster; yields the pool of this machine, which has found out that
    the functions can be loaded, if the config has none."""
    if cluster is None or not config.cluster.reward_workers:
        yield local
        return
    local.close()
    with closing(cluster.for_calls(RewardWorker)) as nodes:
        actors = RewardActors(
            nodes.spawn,
            pool=_arguments(config),
            folder=os.getcwd(),
            most=config.cluster.reward_workers,
            heartbeat_s=config.run.stall_s / 2,
            report=report,
        )
        with TaskPool(actors) as pool:
            yield pool
