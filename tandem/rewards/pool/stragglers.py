"""When a worker is *late*: at one item far longer than items usually take, while others wait.

What is behind that item then goes to a spare, so nobody waits behind it, and the late one ends when
it has answered. As long as late ones mostly do answer, they are merely slow and keep their share of
the cores. Where most of the last ones did not, it is a storm, and a late one that has used its fair
share of processor time runs only when nobody wants the core. A worker that waits for something else
(a judge) uses none: it is never put last, and gets no spare, so that reward.workers bounds the
requests; only what is behind it goes to others.

It knows what has happened to workers, and does nothing to them (crew.py does).
"""

import math
from collections import deque
from collections.abc import Collection

from tandem.rewards.pool.processes import Worker

SPARES, STORM_SPARES = 8, 64  # late workers at once, beside the others; one takes some 7 MB
LATE_S, STORM_LATE_S = 0.05, 0.02  # nobody is late before; in a storm
LATE_RATIO, STORM_LATE_RATIO = 10.0, 4.0  # late: this many times what items usually take
STORM = 4  # late ones of which something must be known before anything is concluded


class Patience:
    """late: how many have a spare; storm: whether most late ones are hopeless."""

    def __init__(self, timeout_s: float):
        self.late, self.storm = 0, False
        self._timeout_s = timeout_s
        # seconds and processor seconds that an item takes: a worker's first (True), which may load
        # much, and others
        self._usual: dict[bool, tuple[float, float]] = {}
        # of late ones: had to be killed (True), or answered
        self._ends: deque[bool] = deque(maxlen=4 * STORM)

    def answered(self, worker: Worker, now: float) -> None:
        first = worker.answered == 0
        seconds, used = now - worker.began, worker.processor_s()
        before, used_before = self._usual.get(first, (seconds, used))
        self._usual[first] = before + (seconds - before) / 8, used_before + (used - used_before) / 8
        if worker.late:
            self._ends.append(False)

    def killed(self, worker: Worker) -> None:
        if worker.late:
            self._ends.append(True)

    def look(self, workers: Collection[Worker], now: float) -> None:
        """It is a storm when most of the last late ones were killed, or have half of their time
        behind them."""
        late = [worker for worker in workers if worker.late]
        hopeless = sum(now - worker.began > self._timeout_s / 2 for worker in late) + sum(
            self._ends
        )
        known = hopeless + self._ends.count(False)
        self.late = sum(not worker.waits for worker in late)
        self.storm = known >= STORM and 2 * hopeless > known

    def late_after(self, worker: Worker) -> float:
        """Seconds at one item that are suspicious; infinite while nothing is known."""
        usual, _ = self._usual.get(worker.answered == 0, (math.inf, math.inf))
        return (
            max(STORM_LATE_S, STORM_LATE_RATIO * usual)
            if self.storm
            else max(LATE_S, LATE_RATIO * usual)
        )

    def too_much(self, worker: Worker) -> bool:
        """Whether it has used so much processor time, in a storm, that it is to wait for all
        others."""
        _, usual = self._usual.get(worker.answered == 0, (math.inf, math.inf))
        return self.storm and worker.processor_s() >= max(STORM_LATE_S, STORM_LATE_RATIO * usual)

    def next_doubt(self, worker: Worker, others_wait: bool) -> float:
        """When to look whether the worker is late or, if it is, uses too much; monotonic
        seconds."""
        if not worker.unanswered or worker.last:
            return math.inf
        if worker.late:
            return worker.looked + STORM_LATE_S if self.storm else math.inf
        waiting = others_wait or len(worker.unanswered) > 1
        room = self.late < (STORM_SPARES if self.storm else SPARES)
        if not (waiting and room):
            return math.inf
        late_at = worker.began + self.late_after(worker)
        return (
            min(late_at, max(worker.looked, worker.began) + STORM_LATE_S) if self.storm else late_at
        )
