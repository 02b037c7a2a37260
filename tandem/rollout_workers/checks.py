"""Checks of what rollout workers have sampled (Engine.logprob_gap): before a step is kept, each
worker that ran its version compares a completion with the trainer's packed pass.

A worker that takes up another version before the step has ended makes the check before it leaves.
One that is lost is left out.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from tandem.rollout_workers.process import WorkerProcess
from tandem.workers.channel import Message, ProtocolError


@dataclass(eq=False)
class Check:
    """A check of completions of one version."""

    version: int
    num_asked: int = 0  # workers that have not answered
    gaps: list[float] = field(default_factory=list)

    @property
    def gap(self) -> float:
        """Return the largest of the gaps, nats; a NaN shows."""
        return float(np.max(self.gaps, initial=0.0))


class Checks:
    """The checks of a pool. send: sends a message to a worker."""

    def __init__(self, send: Callable[[WorkerProcess, Message], None]):
        self._send = send
        self._watched: list[Check] = []
        self._asked: dict[WorkerProcess, deque[list[Check]]] = defaultdict(deque)

    def watch(self, check: Check) -> None:
        """Have each worker make this check before it leaves its version, until `forget`."""
        self._watched.append(check)

    def forget(self, check: Check) -> None:
        self._watched = [one for one in self._watched if one is not check]

    def ask(self, check: Check, workers: Iterable[WorkerProcess]) -> None:
        """Have the workers that run its version make a check; `num_asked` is 0 once all have
        answered that stay up."""
        for worker in workers:
            if worker.is_ready and worker.version == check.version:
                self._ask(worker, [check])

    def leave(self, worker: WorkerProcess) -> None:
        """Have a worker make the checks of the version that it is about to leave."""
        if checks := [check for check in self._watched if check.version == worker.version]:
            self._ask(worker, checks)

    def answer(self, worker: WorkerProcess, gap: float) -> None:
        """Take the answer of a worker. Raises ProtocolError if it was not asked."""
        if not self._asked[worker]:
            raise ProtocolError("an answer to no check")
        for check in self._asked[worker].popleft():
            check.gaps.append(gap)
            check.num_asked -= 1

    def lose(self, worker: WorkerProcess) -> None:
        """Leave out a worker that was lost."""
        for checks in self._asked.pop(worker, ()):
            for check in checks:
                check.num_asked -= 1

    def _ask(self, worker: WorkerProcess, checks: list[Check]) -> None:
        for check in checks:
            check.num_asked += 1
        self._asked[worker].append(checks)
        self._send(worker, {"check": worker.version})
