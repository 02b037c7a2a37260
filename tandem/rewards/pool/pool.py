"""RewardPool: scores attempts in killable worker processes while the caller does something else.

    submit()        -> Future[Score]   from any thread; scores come in any order
    scheduler.py    the pool's own thread: processes, sockets and the clock
    processes.py    its handles of the fork server and of the workers that it forks
    fork_server.py  loads the reward functions once, forks a worker in milliseconds
    worker.py       scores one attempt after another

Knows requests and scores, not reward functions. An attempt can cost its own score only:
at most timeout_s and, until the thread has killed its worker, a moment.
"""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from tandem.rewards.parts import Options, as_it_is, check_functions
from tandem.rewards.pool.processes import ScoringTask
from tandem.rewards.pool.scheduler import PoolScheduler
from tandem.rewards.pool.task_thread import RunningTasks, TaskThread
from tandem.runtime import watchdog
from tandem.types import Attempt, Problem, Score

THREAD = "rewards"  # its name, for the watchdog


class TaskPool(RunningTasks):
    """A pool as the caller holds it, a context. Implements Reward; the work is its thread's."""

    def __init__(self, scheduler: TaskThread[ScoringTask]):
        self._tasks, self._numbers = scheduler, itertools.count()
        super().__init__(scheduler, THREAD)

    def submit(self, problem: Problem, attempt: Attempt) -> Future[Score]:
        """Return a future of the score. Raises RuntimeError if the pool is closed.

        Its exception is a UserError if the functions can no longer be loaded, and a RuntimeError if
        the pool is closed first.
        """
        task = ScoringTask(next(self._numbers), problem, attempt)
        task.future.set_running_or_notify_cancel()  # not to be cancelled: a worker may have it
        self._tasks.add(task)
        return task.future


class RewardPool(TaskPool):
    """A pool that scores attempts with functions: built-ins, `module:function` or
    `file.py:function`; see rewards/load.py and docs/rewards.md.

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
        arguments = (
            json.dumps(functions),
            json.dumps(list(weights)),
            json.dumps(options),
            str(memory_mb),
        )
        self._scheduler = PoolScheduler(
            functions,
            arguments,
            name_function=not as_it_is(functions, weights),
            timeout_s=timeout_s,
            max_workers=workers,
            clock=clock,
        )
        super().__init__(self._scheduler)
        try:
            with watchdog.waiting_for(THREAD, "the first worker"):
                self._scheduler.started.result()
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    @property
    def failures(self) -> dict[str, int]:
        """Attempts that could not be scored, by kind: timeout, died, exception, bad_value."""
        return dict(self._scheduler.failures)
