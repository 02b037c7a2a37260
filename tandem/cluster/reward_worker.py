"""A reward worker on a node of a cluster: a RewardPool of that node, whose calls come from the
driver (reward_actors.py).

    driver                                         here
    {"start": {"folder", "pool", "beat_s"}}   -->  RewardPool(**pool), in that folder
                                              <--  {"ready": true}
    a request of rewards/pool/protocol.py     -->  RewardPool.submit
                                              <--  an answer of it, once there is a score
                                              <--  {"alive": true}    each beat_s
                                              <--  {"error": {"what", ...}}   a UserError: it ends

The pool on this node kills what is late or hostile, as on the driver's machine. Does not know Ray.
"""

import os
import select
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from tandem.cluster.errors import no_working_directory
from tandem.cluster.node_worker import NodeWorker
from tandem.engine.worker_pool.worker import serve_from_start
from tandem.rewards.pool.pool import RewardPool
from tandem.rewards.pool.worker import read_request
from tandem.runtime.worker_channel import Channel, Message, Waker
from tandem.types import Score


class RewardWorker(NodeWorker):
    """A NodeWorker that scores."""

    role = "reward worker"

    def run(self, channel: Channel) -> None:
        serve_from_start(channel, partial(load_pool, channel))


def load_pool(channel: Channel, start: Message) -> Callable[[], None]:
    """Load the reward functions; return what serves the calls of a channel. Raises UserError."""
    try:
        os.chdir(start["folder"])
    except OSError as error:
        raise no_working_directory(start["folder"], error) from None
    return partial(_serve, channel, RewardPool(**start["pool"]), start["beat_s"])


def _serve(channel: Channel, pool: RewardPool, beat_s: float) -> None:
    """Serve until the channel ends: EOFError. Only this thread sends."""
    waker, scored = Waker(), deque[tuple[int, Future[Score]]]()

    def on_score(number: int, score: Future[Score]) -> None:
        scored.append((number, score))
        waker.wake()

    with pool:
        while True:
            ready, _, _ = select.select([channel.socket.fileno(), waker.fileno()], [], [], beat_s)
            if waker.fileno() in ready:
                waker.clear()
            for message in channel.receive():
                score = pool.submit(*read_request(message))
                score.add_done_callback(partial(on_score, message["id"]))
            while scored:
                number, score = scored.popleft()
                channel.send(_answer(number, score.result()))
            if time.monotonic() - channel.last_sent >= beat_s:
                channel.send({"alive": True})


def _answer(number: int, score: Score) -> Message:
    fields = {"reward": score.reward, "parts": score.parts, "error": score.error}
    return {"id": number, **fields, "kind": "", "last": False}
