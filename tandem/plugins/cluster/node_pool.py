"""Pools of calls whose workers are on the nodes of a cluster: attempts to score, and the calls of
episodes' environments. A node's worker serves several at once, and deadlines are its matter.

    pool                                      a node
    ----                                      ------
    RewardActors                         -->  RewardWorker
    env_actors.py: EnvActors             -->  EnvWorker

Knows no Ray.
"""

from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from tandem.plugins.cluster.node_worker import CallNode
from tandem.rewards.pool import RewardPool, ScorePool
from tandem.rewards.protocol import read_request
from tandem.runtime.errors import UserError
from tandem.types import Score
from tandem.workers.calls import CallPool, CallWorker, Q
from tandem.workers.channel import Message
from tandem.workers.host import Host, OpenHost
from tandem.workers.pool import Limits


class NodePool(CallPool[CallWorker, Q]):
    """A CallPool on nodes. start: the message that starts a worker. heartbeat_s: without a sign of
    life, until one is lost. options: of CallPool."""

    def __init__(self, open_host: OpenHost, *, start: Message, heartbeat_s: float, **options: Any):
        self._start_message = start
        super().__init__(open_host, Limits(silent_s=heartbeat_s), **options)
        self.start()

    def _make(self, number: int, host: Host) -> CallWorker:
        return CallWorker(self.role, number, host, self._clock())

    def _start_of(self, worker: CallWorker) -> Message:
        return self._start_message

    def _refusal(self, worker: CallWorker, error: UserError) -> UserError:
        error.where = f"{error.where}, {worker}"
        return error

    def _cannot_go_on(self, worker: CallWorker, lost: str) -> UserError:
        key = f"cluster.{self.role.replace(' ', '_')}s"
        return UserError(
            f"{self._restarts.limit + 1} {self.role}s were lost in a row, and none has answered",
            where=key,
            found=f"{lost}\n{worker.host.last_words()}".rstrip(),
            next=f"look at that node's memory and logs, or leave it to the driver: {key}=0",
        )


class RewardActors(NodePool[Any], ScorePool[CallWorker]):
    """A pool of reward workers on nodes. pool: the arguments of a worker's RewardPool. folder:
    where relative names are looked for."""

    def __init__(self, open_host: OpenHost, *, pool: dict[str, Any], folder: str, **options: Any):
        depth = 2 * pool["workers"]  # one is scored while the next one is on its way
        start = {"pool": pool, "folder": folder}
        super().__init__(open_host, start=start, depth=depth, **options)


# ---------------------------------------------------------------- on a node


class Scores(AbstractContextManager[None]):
    """The Service of a reward worker. A call is a request of rewards/protocol.py, its answer one of
    it. The pool on this node kills what is late or hostile, as on the driver's machine."""

    def __init__(self, start: Message):
        self._pool = RewardPool(**start["pool"])

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def submit(self, call: Message) -> Future[Score]:
        return self._pool.submit(*read_request(call))

    def answer(self, result: Score) -> Message:
        fields = {"reward": result.reward, "parts": result.parts, "error": result.error}
        return {**fields, "kind": "", "last": False}

    def check(self) -> None:
        pass


class RewardWorker(CallNode):
    """A node's worker that scores."""

    role, service = "reward worker", Scores
