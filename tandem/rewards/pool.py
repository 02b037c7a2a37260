"""RewardPool: scores attempts in killable worker processes while the caller does something else.

    submit()      -> Future[Score]   from any thread; scores come in any order
    workers/      its thread; a fork server that loads the functions once, and forks workers
    worker.py     scores one attempt after another

Knows requests and scores, not reward functions. An attempt can cost its own score only: at most
timeout_s and, until the thread has killed its worker, a moment. timeout_s is for all functions
together. A worker that ends with an attempt costs it nothing the first time, as the cause may lie
outside. A worker has one attempt at a time.

A hung call holds its worker until its deadline. So `reward.workers` bounds the requests to a judge,
and a pool for samples that may hang has more workers than cores (benchmarks/storm.py).
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
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

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "tandem.rewards.worker")
THREAD = "rewards"  # its name, for the watchdog
LIMITS = Limits(
    start_s=60.0,  # importing the user's module or Math-Verify, on a cold disk under load
    restarts=2,
    losses=2,
)


class RewardWorker(CallWorker):
    """A worker, and where it is in its call."""

    function = 0  # index of the one that scores


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
        self.timeout_s, self._functions = timeout_s, functions
        self._names_function = not as_it_is(functions, weights)
        self._spec = {
            "functions": functions,
            "weights": list(weights),
            "options": options,
            "memory_mb": memory_mb,
        }
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
        if kind == "timeout" and self.failures[kind] == 1:
            logger.warning("a reward is late, so 0: %s (reward.timeout_s; told once)", error)
        if worker is not None and self._names_function:
            error = f"{part_name(self._functions[worker.function])}: {error}"
        super()._fail(worker, call, kind, error)

    def _give(self, worker: RewardWorker, call: Call[Scoring]) -> None:
        super()._give(worker, call)
        worker.function = 0

    def _on_answer(self, worker: RewardWorker, call: Call[Scoring], message: Message) -> None:
        """Take a score, or the note that another function runs."""
        if message.get("at") == worker.function + 1 < len(self._functions):
            worker.function += 1
        else:
            _, kind, last = read_score(message)
            if kind:
                self.failures[kind] += 1
            super()._on_answer(worker, call, message)
            if last:
                self._end(worker)
