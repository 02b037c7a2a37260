"""RewardPool: scores attempts in killable worker processes while the caller does something else.

    submit()      -> Future[Score]   from any thread; scores come in any order
    workers/      its thread; a fork server that loads the functions once, and forks workers
    worker.py     scores one attempt after another

Knows requests and scores, not reward functions. An attempt can cost its own score only: at most
timeout_s and, until the thread has killed its worker, a moment. timeout_s is for all functions
together. A worker that ends with an attempt costs it nothing the first time, as the cause may lie
outside. A worker has one attempt at a time.

Stragglers use far more processor time than usual while other calls wait. A spare takes the place of
a straggler's worker, so that an endless loop holds up nobody. If most of the last stragglers had to
be killed, the pool is overloaded: a straggler then runs only when nobody else wants the core, as it
would take the time that honest calls need before their own deadline (benchmarks/storm.py). A call
that waits, for a judge or a program, uses no processor time and is never a straggler, so that
reward.workers bounds the requests to a judge. Processor time is known on Linux only; elsewhere
nothing is a straggler.
"""

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic

from tandem.rewards.parts import Options, as_it_is, cannot_load, check_functions, part_name
from tandem.rewards.protocol import Scoring, read_score, request_line
from tandem.runtime import watchdog
from tandem.runtime.errors import UserError
from tandem.types import Attempt, Problem, Score
from tandem.workers.calls import Call, CallPool, CallWorker, V
from tandem.workers.channel import Message
from tandem.workers.host import Host, LocalHosts
from tandem.workers.pool import Limits

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

    def on_end(self, worker: RewardWorker, *, killed: bool) -> None:
        if not killed:
            used = max(0.0, worker.processor_s())
            before = used if self._usual_s is None else self._usual_s
            self._usual_s = before + (used - before) / 8
        if worker.straggler:
            self._killed.append(killed)

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


COMMAND = (sys.executable, "-m", "tandem.rewards.worker")
THREAD = "rewards"  # its name, for the watchdog
LOADING_S = 20.0  # importing Math-Verify on a cold disk; allowed once for each process
LIMITS = Limits(
    start_s=60.0,  # importing the user's module, on a cold disk under load
    restarts=2,
    losses=2,
)


class ScorePool(CallPool[V, Scoring], Generic[V]):
    """A pool whose calls are attempts to score. Implements Reward."""

    role, thread = "reward worker", THREAD
    timeout_s = float("inf")

    def submit(self, problem: Problem, attempt: Attempt) -> Future[Score]:
        """Return a future of the score. Raises RuntimeError if the pool is closed.

        Its exception is a UserError if the functions can no longer be loaded, and a RuntimeError if
        the pool is closed first.
        """
        return self.submit_call((problem, attempt), self.timeout_s)

    def _encode(self, worker: V, call: Call[Scoring]) -> bytes:
        return request_line(call.index, *call.asked)

    def _result(self, message: Message) -> Score:
        return read_score(message)[0]

    def _fail(self, worker: V | None, call: Call[Scoring], kind: str, error: str) -> None:
        call.future.set_result(Score(reward=0.0, parts={}, error=error))


class RewardPool(ScorePool[RewardWorker]):
    """A pool that scores attempts with functions: built-ins, `module:function` or
    `file.py:function`; see rewards/load.py and docs/guide/rewards.md.

    Example: RewardPool("answer").submit(problem, Attempt(text="Answer: 3")).result() gives
    Score(reward=1.0, parts={"answer": 1.0}). With several functions, or weights, the reward is the
    sum of weight x reward in their order, and each function's reward and parts are parts
    (parts.weigh has their names). An attempt that cannot be scored has reward 0 and an error with
    the reason, and the function if there are several; failures counts them by kind.

    options: keyword arguments by function name. memory_mb bounds the address space of each process.
    clock: monotonic seconds. Raises UserError if a function cannot be loaded.
    """

    def __init__(
        self,
        functions: str | Sequence[str],
        timeout_s: float = 5.0,
        workers: int = 1,
        *,
        weights: Sequence[float] = (),
        options: Options = {},  # noqa: B006
        memory_mb: int = 2048,
        clock: Callable[[], float] = time.monotonic,
    ):
        functions = (functions,) if isinstance(functions, str) else tuple(functions)
        check_functions(functions, weights, options)
        self.failures = {"timeout": 0, "died": 0, "exception": 0, "bad_value": 0}
        self.timeout_s, self._max_workers, self._functions = timeout_s, workers, functions
        self._names_function = not as_it_is(functions, weights)
        self._spec = {
            "functions": functions,
            "weights": list(weights),
            "options": options,
            "memory_mb": memory_mb,
        }
        self._stragglers, self._next_check = StragglerDetector(), 0.0
        # one hash seed: sympy then orders terms alike
        self._local = LocalHosts(
            COMMAND, {"PYTHONHASHSEED": "0"}, json.dumps(self._spec), log=False
        )
        super().__init__(self._local.open, LIMITS, depth=1, most=workers, clock=clock)
        self.start()
        try:
            with watchdog.waiting_for(THREAD, "the first worker"):
                self.started.result()
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def _end_all(self) -> None:
        super()._end_all()
        self._local.close()

    def _make(self, number: int, host: Host) -> RewardWorker:
        return RewardWorker(self.role, number, host, self._clock())

    def _start_of(self, worker: RewardWorker) -> Message:
        return self._spec

    def _cannot_go_on(self, worker: RewardWorker, lost: str) -> UserError:
        return cannot_load(self._functions[0], f"while it was being loaded: {lost}", "")

    def _fail(
        self, worker: RewardWorker | None, call: Call[Scoring], kind: str, error: str
    ) -> None:
        self.failures[kind] += 1
        if worker is not None:
            self._stragglers.on_end(worker, killed=True)
            if self._names_function:
                error = f"{part_name(self._functions[worker.function])}: {error}"
        super()._fail(worker, call, kind, error)

    def _give(self, worker: RewardWorker, call: Call[Scoring]) -> None:
        super()._give(worker, call)
        worker.start_call()

    def _on_answer(self, worker: RewardWorker, call: Call[Scoring], message: Message) -> None:
        """Take a score, or a note: another function runs, or Math-Verify is being imported."""
        if message.get("at") == worker.function + 1 < len(self._functions):
            worker.function += 1
        elif "loading" in message and worker.loading_notes:
            worker.loading_notes -= 1
            begins = message["loading"] is True
            call.ends = self._clock() + (LOADING_S if begins else call.deadline_s)
            worker.count_from_now(paused=begins)
            if not begins:
                self._local.import_ahead("math_verify")
        else:
            _, kind, last = read_score(message)
            self._stragglers.on_end(worker, killed=False)
            if kind:
                self.failures[kind] += 1
            super()._on_answer(worker, call, message)
            if last or worker.straggler:
                self._end(worker)

    def _look_s(self, due: int) -> float | None:
        look_s = super()._look_s(due)
        return look_s if look_s is None or not self._todo else min(look_s, CHECK_S)

    def _scale(self) -> None:
        """Let spares join for stragglers."""
        if (now := self._clock()) >= self._next_check:
            self._next_check = now + CHECK_S
            self._stragglers.mark(self._workers.values(), others_wait=bool(self._todo))
        self.most = self._max_workers + sum(one.straggler for one in self._workers.values())
        super()._scale()
