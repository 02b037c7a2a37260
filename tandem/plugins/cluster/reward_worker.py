"""A reward worker on a node of a cluster: a RewardPool of that node, whose calls come from the
driver (reward_actors.py).

A call is a request of rewards/pool/protocol.py, its answer one of it. The pool on this node kills
what is late or hostile, as on the driver's machine. Does not know Ray.
"""

from concurrent.futures import Future

from tandem.plugins.cluster.call_worker import CallWorker
from tandem.rewards.pool.pool import RewardPool
from tandem.rewards.pool.worker import read_request
from tandem.runtime.worker_channel import Message
from tandem.types import Score


class RewardWorker(CallWorker):
    """A CallWorker that scores."""

    role = "reward worker"

    def load(self, start: Message) -> RewardPool:
        self._pool = RewardPool(**start["pool"])
        return self._pool

    def submit(self, call: Message) -> Future[Score]:
        return self._pool.submit(*read_request(call))

    def answer(self, result: Score) -> Message:
        fields = {"reward": result.reward, "parts": result.parts, "error": result.error}
        return {**fields, "kind": "", "last": False}
