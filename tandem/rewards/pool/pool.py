"""RewardPool: scores attempts in killable worker processes while the caller does something else.

    submit()  -> Future[Score]      from any thread; scores come in any order, each in its own future
    crew.py      one thread of the pool's own: processes, sockets and the clock, outside of what it times
    process.py   its handles of a template process and of the workers that the template forks
    template.py  loads the reward functions once, forks a worker in milliseconds
    worker.py    scores one attempt after another; load.py and builtin.py have the functions

It knows how a score is asked for, and not what a reward is. An attempt can cost its own score only:
at most timeout_s and, until the thread has killed its worker, a moment.
"""

import itertools
import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from tandem.rewards.parts import Options, as_it_is, check_functions
from tandem.rewards.pool.processes import Item
from tandem.rewards.pool.scheduler import Crew
from tandem.runtime import watchdog
from tandem.types import Attempt, Problem, Score

THREAD = "rewards"  # whom to wait for, where the watchdog is told


class RewardPool:
    """Scores attempts with functions: built-ins, `module:function` or `file.py:function`; see
    load.py and docs/rewards.md.

    Example: RewardPool("answer").submit(problem, Attempt(text="Answer: 3")).result() gives
    Score(reward=1.0, parts={"answer": 1.0}). With several functions, or weights, the reward is the
    sum of weight x reward in their order, and each function's reward and parts are parts
    (parts.weigh has their names). options: keyword arguments by function name. An attempt that
    cannot be scored has reward 0 and says why in its error, and in which of several functions;
    failures counts those by kind. Raises UserError if a function cannot be loaded. memory_mb bounds
    the address space of each process.
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
    ):
        functions = (functions,) if isinstance(functions, str) else tuple(functions)
        check_functions(functions, weights, options)
        arguments = (
            json.dumps(functions),
            json.dumps(list(weights)),
            json.dumps(options),
            str(memory_mb),
        )
        self._crew = Crew(functions, as_it_is(functions, weights), arguments, timeout_s, workers)
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._crew.run, name=THREAD, daemon=True)
        self._thread.start()
        try:
            with watchdog.waits(of=THREAD, what="the first worker"):
                self._crew.started.result()
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    @property
    def failures(self) -> dict[str, int]:
        """How many attempts could not be scored, by kind: timeout, died, exception, bad_value."""
        return dict(self._crew.failures)

    def submit(self, problem: Problem, attempt: Attempt) -> Future[Score]:
        """The score, in time. Its exception is a UserError if the functions cannot be loaded any
        more, and a RuntimeError if the pool is closed first. Raises RuntimeError if it is closed
        already."""
        item = Item(next(self._numbers), problem, attempt)
        item.future.set_running_or_notify_cancel()  # it cannot be cancelled: a worker may be at it
        self._crew.add(item)
        return item.future

    def close(self) -> None:
        """Kill the workers and give everything back; a second call does nothing."""
        self._crew.stop()
        with watchdog.waits(of=THREAD, what="the end of its workers"):
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()
