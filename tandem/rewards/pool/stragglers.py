"""Stragglers: tasks that use far more processor time than usual while other tasks wait.

The tasks behind a straggler go to other workers and a spare takes its place, so that an endless
loop holds up nobody. If most of the last stragglers had to be killed, the pool is overloaded: a
straggler then runs only when nobody else wants the core, as it would take the time that honest
tasks need before their own deadline (benchmarks/storm.py). A task that waits, for a judge or a
program, uses no processor time and is never a straggler, so that reward.workers bounds the requests
to a judge. Processor time is known on Linux only; elsewhere nothing is a straggler.
"""

from collections import deque
from collections.abc import Collection

from tandem.rewards.pool.processes import Worker

MAX_STRAGGLERS = 16  # each has a spare, of some 7 MB
CHECK_S = 0.02
MIN_S, RATIO = 0.02, 5.0  # processor seconds, and times the usual ones
_EVIDENCE = 4  # stragglers that must have ended before anything is concluded


class StragglerDetector:
    """A detector that knows the usual time of tasks, and how the last stragglers ended."""

    def __init__(self) -> None:
        self._usual_s: float | None = None  # moving average of processor seconds
        self._killed: deque[bool] = deque(maxlen=4 * _EVIDENCE)  # or answered, of the last ones

    def on_score(self, worker: Worker) -> None:
        used = max(0.0, worker.processor_s())
        before = used if self._usual_s is None else self._usual_s
        self._usual_s = before + (used - before) / 8
        if worker.straggler:
            self._killed.append(False)

    def on_kill(self, worker: Worker) -> None:
        if worker.straggler:
            self._killed.append(True)

    @property
    def overloaded(self) -> bool:
        return len(self._killed) >= _EVIDENCE and 2 * sum(self._killed) > len(self._killed)

    def mark(self, workers: Collection[Worker], *, others_wait: bool) -> None:
        """Mark the workers that have become stragglers while tasks wait, and deprioritize them
        if the pool is overloaded."""
        room = MAX_STRAGGLERS - sum(worker.straggler for worker in workers)
        for worker in workers:
            waiting = worker.tasks and (others_wait or len(worker.tasks) > 1)
            if room and waiting and not worker.straggler and self.is_straggler(worker):
                worker.straggler = worker.last_task = True
                room -= 1
            if worker.straggler and self.overloaded and not worker.deprioritized:
                worker.deprioritize()

    def is_straggler(self, worker: Worker) -> bool:
        """Tell whether the task in flight is a straggler, by its processor time; False before the
        first score."""
        usual = self._usual_s
        return usual is not None and worker.processor_s() > max(MIN_S, RATIO * usual)
