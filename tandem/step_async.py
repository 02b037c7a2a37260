"""The step with rollouts ahead of the training: the halves of step.py, by a logical clock.

With rollout.staleness k the rollouts of step t are sampled by the weights of version max(0, t - k),
and by no others. So they need nothing of the steps t - k, ..., t - 1, which may be trained
meanwhile. k = 1, time to the right:

    trainer          |  learn 0  |  learn 1  |  learn 2  | ...    takes batch t, gives version t + 1
    rollouts  roll 0 |  roll 1   |  roll 2   |  roll 3   | ...    takes version t - k, gives batch t
    weights   v0     |  v0       |  v1       |  v2       |

    trainer   get(t)                 waits for batch t; `_roll` or an error of the rollouts wakes it
              publish                never waits
    saver     wait_until_durable(v)  waits for the batches of weights older than v; the same wakes
                                     it, and `stop_soon`
    rollouts  _wait_for_weights      waits for version t - k; `publish` or `close` wakes it

Without worker processes (rollout.workers = 0) the halves take turns: `get(t)` first rolls out all
steps up to t + k. The bits are the same, because a rollout sees the same weights and data.
Batches of weights that a resumed run no longer has stand in the journal: a checkpoint counts only
once they are durable (`wait_until_durable`).

    tandem train RECIPE rollout.staleness=1 rollout.workers=1 rl.correction=decoupled
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from tandem.rollout.collect import RolloutBatch, step_metrics
from tandem.runtime import signals, watchdog
from tandem.runtime.errors import UserError
from tandem.runtime.timer import Timer
from tandem.step import Stages, StepResult, learn_step, rollout_step

LEAVE_S = 3.0  # for rollouts that a save waits for, and for their thread, once the run is left
POLL_S = 0.5


def train_step_async(prefetcher: "RolloutPrefetcher", step: int) -> StepResult:
    """Make step `step`, as train_step does, with a batch that was rolled out ahead of time."""
    stages, timer = prefetcher.stages, Timer()
    with timer("wait_s"):
        batch, rollout_timer = prefetcher.get(step)
    with timer("learn_s"):
        stages.before_updates(batch)
        groups = stages.stream.take(step, batch.groups, stages.plan_share)
        metrics = learn_step(stages, replace(batch, groups=groups))
        stages.stream.clear(step)
    with timer("sync_s"):
        prefetcher.publish(step + 1)
    ahead = rollout_timer.timings(tokens=batch.num_tokens)
    speed = {"generated_tokens_per_s": ahead["generated_tokens_per_s"]}
    return StepResult(
        metrics=step_metrics(batch, metrics, stages.config),
        timings=rollout_timer.parts | rollout_timer.bytes | timer.timings(tokens=0) | speed,
        state=batch.state,
    )


class RolloutPrefetcher:
    """Rollouts step after step, at most rollout.staleness ahead of the training; in a thread if
    there are workers. stop_workers: ends a rollout under way."""

    def __init__(
        self, stages: Stages, num_steps: int, stop_workers: Callable[[], None] = lambda: None
    ):
        self.stages, self.num_steps, self._stop_workers = stages, num_steps, stop_workers
        self.staleness = stages.config.rollout.staleness
        self.threaded = stages.config.rollout.workers > 0
        self._ready: dict[int, tuple[RolloutBatch, Timer]] = {}
        self._next = self._version = 0  # the step to roll out next; the weights published
        self._change = threading.Condition()
        self._error: Exception | None = None
        self._closed, self._deadline = False, math.inf
        self._thread: threading.Thread | None = None

    def start(self, step: int) -> None:
        """Start at this step, whose weights are published already."""
        self._next = self._version = step
        if self.threaded:
            self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
            self._thread.start()

    def publish(self, version: int) -> None:
        """Publish the trainer's weights as that version."""
        self.stages.sync.publish(version)
        with self._change:
            self._version = version
            self._change.notify_all()

    def get(self, step: int) -> tuple[RolloutBatch, Timer]:
        """Wait for the batch of a step. Raises the errors of the rollouts."""
        if not self.threaded:
            while self._next < min(step + self.staleness + 1, self.num_steps):
                self._roll()
        self._wait_for(step)
        return self._ready.pop(step)

    def wait_until_durable(self, version: int) -> None:
        """Wait until all rollouts by weights older than `version` are in the journal.

        Raises UserError LEAVE_S after `stop_soon`.
        """
        if self.threaded:
            last = min(version + self.staleness, self.num_steps) - 1
            self._wait_for(last, until_deadline=True)

    def stop_soon(self) -> None:
        """Give `wait_until_durable` LEAVE_S more: the run is being left."""
        with self._change:
            self._deadline = time.monotonic() + LEAVE_S
            self._change.notify_all()

    def close(self) -> None:
        """End the rollouts, the one under way too."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._stop_workers()
        if self._thread is not None:
            self._thread.join(LEAVE_S)

    def _wait_for(self, step: int, until_deadline: bool = False) -> None:
        """Wait until the batch of a step is rolled out. Raises the errors of the rollouts."""
        waits = watchdog.waiting_for("rollouts", f"the episodes of step {step + 1}")
        with signals.allow_interrupts(), self._change, waits:
            while self._next <= step and self._error is None:
                if until_deadline and time.monotonic() > self._deadline:
                    break
                self._change.wait(POLL_S)
            if self._next <= step:
                raise self._error or _not_rolled_out(step)

    # The rollouts' thread, or the trainer's own.

    def _run(self) -> None:
        try:
            while self._next < self.num_steps and self._wait_for_weights():
                self._roll()
        except Exception as error:  # raised again by `get`
            with self._change:
                self._error = error
                self._change.notify_all()

    def _wait_for_weights(self) -> bool:
        """Wait for the weights of the next rollout; return False if the run is over first."""
        version = max(0, self._next - self.staleness)
        waits = watchdog.waiting_for("trainer", f"the weights of version {version}")
        with self._change, waits:
            self._change.wait_for(lambda: self._version >= version or self._closed)
            return not self._closed

    def _roll(self) -> None:
        timer = Timer()
        batch = rollout_step(self.stages, self._next, timer)
        with self._change:
            self._ready[self._next] = batch, timer
            self._next += 1
            self._change.notify_all()


def _not_rolled_out(step: int) -> UserError:
    return UserError(
        "rollouts of older weights have not ended",
        where=f"step {step + 1}",
        found="none",
        expected="its file in the journal",
    )
