"""The loop with rollouts ahead of the training: the stages of step.py, by a logical clock.

With rollout.staleness k the rollouts of step t are sampled by the weights of version max(0, t - k),
and by no others. So they need nothing of the steps t - k, ..., t - 1, which may be trained
meanwhile. k = 1, time to the right:

    trainer          |  update 0  |  update 1  |  update 2  | ...     takes Rolled t, gives version t + 1
    rollouts  roll 0 |  roll 1    |  roll 2    |  roll 3    | ...     takes version t - k, gives Rolled t
    weights   v0     |  v0        |  v1        |  v2        |

    trainer   take(t)     waits for Rolled t; `_roll` or an error of the rollouts unblocks it
              publish     never waits
    saver     settled(v)  waits for what weights older than v roll out; the same unblocks it, and `hurry`
    rollouts  _has_weights waits until version t - k is published; `published` or `close` unblocks it

Without worker processes (rollout.workers = 0) nothing runs at the same time: `take(t)` first rolls
what it may, up to step t + k. The bits are the same, because what a rollout sees is the same. What
is rolled out under weights that a resumed run no longer has stands in the journal: a checkpoint
counts only once that is durable (`settled`).

    tandem train RECIPE rollout.staleness=1 rollout.workers=1 rl.correction=decoupled
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tandem.rollout.episode_metrics import episode_metrics
from tandem.rollout.score import Timer
from tandem.runtime import signals, watchdog
from tandem.runtime.errors import UserError
from tandem.step import RolloutBatch, Stages, Update, roll
from tandem.types import Row

# for rollouts that a save waits for, and then for their thread, once the run is being left
LEAVE_S = 3.0
LOOK_S = 0.5

Made = tuple[RolloutBatch, Timer]


def train_step_async(
    ahead: "RolloutPrefetcher", step: int, update: Update
) -> tuple[Row, Row, dict[str, Any]]:
    """As loop.train_step, with the rollouts taken from those made ahead."""
    clock = Timer()
    with clock("wait_s"):
        rolled, rolling = ahead.take(step)
    with clock("learn_s"):
        metrics = update(ahead.stages, rolled)
    with clock("sync_s"):
        ahead.publish(step + 1)
    timings = {**rolling.parts, **clock.timings(tokens=0)}
    return (
        {**episode_metrics(rolled.told), **metrics},
        timings | _speed(rolled, rolling),
        rolled.state,
    )


def _speed(rolled: RolloutBatch, rolling: Timer) -> Row:
    return {
        "generated_tokens_per_s": rolling.timings(tokens=rolled.tokens)["generated_tokens_per_s"]
    }


class RolloutPrefetcher:
    """Rolls out step after step, at most rollout.staleness ahead of the training; in a thread where
    there are workers."""

    def __init__(self, stages: Stages, steps: int, stop_workers: Callable[[], None]):
        self.stages, self.steps, self.stop_workers = stages, steps, stop_workers
        self.staleness, self.threaded = (
            stages.config.rollout.staleness,
            stages.config.rollout.workers > 0,
        )
        self._made: dict[int, Made] = {}
        self._next = self._version = 0  # the step to roll next; the weights that are published
        self._change = threading.Condition()
        self._error: Exception | None = None
        self._over, self._leave_at = False, math.inf
        self._thread: threading.Thread | None = None

    def begin(self, step: int) -> None:
        """From this step on; its weights are published already."""
        self._next = self._version = step
        if self.threaded:
            self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
            self._thread.start()

    def publish(self, version: int) -> None:
        self.stages.sync.publish(version)
        with self._change:
            self._version = version
            self._change.notify_all()

    def take(self, step: int) -> Made:
        """What step `step` trains on. Raises what the rollouts raised."""
        if not self.threaded:
            while self._next < min(step + self.staleness + 1, self.steps):
                self._roll()
        self._wait_for(step)
        return self._made.pop(step)

    def wait_until_durable(self, version: int) -> None:
        """Wait until everything that older weights than this version roll out is in the journal, as
        it is without a thread. Raises UserError LEAVE_S after `hurry`."""
        if self.threaded:
            self._wait_for(min(version + self.staleness, self.steps) - 1, hurried=True)

    def stop_soon(self) -> None:
        with self._change:
            self._leave_at = time.monotonic() + LEAVE_S
            self._change.notify_all()

    def close(self) -> None:
        with self._change:
            self._over = True
            self._change.notify_all()
        self.stop_workers()
        if self._thread is not None:
            self._thread.join(LEAVE_S)

    def _wait_for(self, step: int, hurried: bool = False) -> None:
        waits = watchdog.waits(of="rollouts", what=f"the episodes of step {step + 1}")
        with signals.interruptible(), self._change, waits:
            while (
                self._next <= step
                and self._error is None
                and not (hurried and time.monotonic() > self._leave_at)
            ):
                self._change.wait(LOOK_S)
            if self._next <= step:
                raise self._error or UserError(
                    "rollouts of older weights have not ended",
                    where=f"step {step + 1}",
                    found="none",
                    expected="its file in the journal",
                )

    # ---- the rollouts' thread, or the trainer's own

    def _run(self) -> None:
        try:
            while self._next < self.steps and self._has_weights(self._next - self.staleness):
                self._roll()
        except Exception as error:  # whoever takes the next step gets it
            with self._change:
                self._error = error
                self._change.notify_all()

    def _has_weights(self, version: int) -> bool:
        """Wait until it is published; false where the run is over."""
        with (
            self._change,
            watchdog.waits(of="trainer", what=f"the weights of version {max(0, version)}"),
        ):
            self._change.wait_for(lambda: self._version >= version or self._over)
            return not self._over

    def _roll(self) -> None:
        clock = Timer()
        rolled = roll(self.stages, self._next, clock)
        with self._change:
            self._made[self._next] = rolled, clock
            self._next += 1
            self._change.notify_all()


@contextmanager
def open_prefetcher(
    stages: Stages, steps: int, stop_workers: Callable[[], None] = lambda: None
) -> Iterator[RolloutPrefetcher]:
    """leave: makes a rollout under way end, whatever comes of it."""
    ahead = RolloutPrefetcher(stages, steps, stop_workers)
    try:
        yield ahead
    finally:
        ahead.close()
