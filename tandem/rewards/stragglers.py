"""Stragglers: calls that use far more processor time than usual while other calls wait.

A spare takes the place of a straggler's worker, so that an endless loop holds up nobody. If most of
the last stragglers had to be killed, the pool is overloaded: a straggler then runs only when nobody
else wants the core, as it would take the time that honest calls need before their own deadline
(benchmarks/storm.py). A call that waits, for a judge or a program, uses no processor time and is
never a straggler, so that reward.workers bounds the requests to a judge. Processor time is known on
Linux only; elsewhere nothing is a straggler.
"""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress

from tandem.workers.calls import CallWorker
from tandem.workers.host import Host

MAX_STRAGGLERS = 16  # each has a spare, of some 7 MB
CHECK_S = 0.02
MIN_S, RATIO = 0.02, 5.0  # processor seconds, and times the usual ones
_EVIDENCE = 4  # stragglers that must have ended before anything is concluded


class RewardWorker(CallWorker):
    """A worker, and the processor time of what it scores."""

    def __init__(self, role: str, number: int, host: Host, now: float):
        super().__init__(role, number, host, now)
        self.function = 0  # index of the one that scores
        self.loading_notes = 2  # how many more are believed: an import begins, and has ended
        self.straggler = False  # its call takes long, and a spare works
        self.deprioritized = False
        self._used_before = 0.0  # processor seconds of the process before its call

    def start_call(self) -> None:
        self.function = 0
        self.count_from_now()

    def count_from_now(self, *, paused: bool = False) -> None:
        """Count processor seconds from now on; none while paused."""
        self._used_before = math.inf if paused else self._processor_clock()

    def processor_s(self) -> float:
        """Return the processor seconds of its call, without child processes; 0 if unknown."""
        return self._processor_clock() - self._used_before

    def _processor_clock(self) -> float:
        if sys.platform != "linux":
            return 0.0
        try:
            return time.clock_gettime(~self.pid << 3 | 2)  # as clock_getcpuclockid(3) makes it
        except OSError:  # it is gone
            return 0.0

    def deprioritize(self) -> None:
        """Let the process run only on an otherwise idle core. Irreversible without privileges."""
        self.deprioritized = True
        if sys.platform == "linux":
            with suppress(ProcessLookupError, PermissionError):
                os.sched_setscheduler(self.pid, os.SCHED_IDLE, os.sched_param(0))


class StragglerDetector:
    """A detector that knows the usual time of calls, and how the last stragglers ended."""

    def __init__(self) -> None:
        self._usual_s: float | None = None  # moving average of processor seconds
        self._killed: deque[bool] = deque(maxlen=4 * _EVIDENCE)  # or answered, of the last ones

    def on_score(self, worker: RewardWorker) -> None:
        used = max(0.0, worker.processor_s())
        before = used if self._usual_s is None else self._usual_s
        self._usual_s = before + (used - before) / 8
        if worker.straggler:
            self._killed.append(False)

    def on_kill(self, worker: RewardWorker) -> None:
        if worker.straggler:
            self._killed.append(True)

    @property
    def overloaded(self) -> bool:
        return len(self._killed) >= _EVIDENCE and 2 * sum(self._killed) > len(self._killed)

    def mark(self, workers: Collection[RewardWorker], *, others_wait: bool) -> None:
        """Mark the workers that have become stragglers while calls wait, and deprioritize them
        if the pool is overloaded."""
        room = MAX_STRAGGLERS - sum(worker.straggler for worker in workers)
        for worker in workers:
            waits = worker.calls and others_wait
            if room and waits and not worker.straggler and self.is_straggler(worker):
                worker.straggler = True
                room -= 1
            if worker.straggler and self.overloaded and not worker.deprioritized:
                worker.deprioritize()

    def is_straggler(self, worker: RewardWorker) -> bool:
        """Tell whether its call is a straggler, by its processor time; False before the
        first score."""
        usual = self._usual_s
        return usual is not None and worker.processor_s() > max(MIN_S, RATIO * usual)
