"""Reward workers on the nodes of a cluster: a NodePool whose calls are attempts to score."""

from typing import Any

from tandem.plugins.cluster.node_pool import NodePool, NodeProcess
from tandem.rewards.pool.processes import ScoringTask
from tandem.rewards.pool.protocol import read_score, request_line
from tandem.runtime.worker_channel import Message
from tandem.types import Score


class RewardActors(NodePool[ScoringTask]):
    """The thread of a TaskPool on a cluster. pool: the arguments of a worker's RewardPool. folder:
    where relative names are looked for. others: of NodePool."""

    role = "reward worker"

    def __init__(self, spawn: Any, *, pool: dict[str, Any], folder: str, **others: Any):
        depth = 2 * pool["workers"]  # one is scored while the next one is on its way
        super().__init__(spawn, start={"pool": pool, "folder": folder}, depth=depth, **others)

    def _encode(self, worker: NodeProcess, task: ScoringTask) -> bytes:
        return request_line(task.index, task.problem, task.attempt)

    def _read(self, message: Message) -> Score | None:
        return read_score(message)[0]

    def _fail(self, task: ScoringTask, error: str) -> None:
        task.future.set_result(Score(reward=0.0, parts={}, error=error))
