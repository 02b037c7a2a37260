"""A reward worker on a node of a cluster: a RewardPool of that node, whose calls come from the
driver (node_pool.py).

A call is a request of rewards/protocol.py, its answer one of it. The pool on this node kills what
is late or hostile, as on the driver's machine. Does not know Ray.
"""

from concurrent.futures import Future
from contextlib import AbstractContextManager

from tandem.plugins.cluster.node_worker import CallNode
from tandem.rewards.pool import RewardPool
from tandem.rewards.protocol import read_request
from tandem.types import Score
from tandem.workers.channel import Message


class Scores(AbstractContextManager[None]):
    """The Service of a reward worker."""

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
