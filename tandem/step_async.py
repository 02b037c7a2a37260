"""The step with rollouts ahead of the training: the halves of step.py, by a logical clock.

With rollout.staleness k the rollouts of step t are sampled by the weights of version max(0, t - k),
and by no others. So they need nothing of the steps t - k, ..., t - 1, which may be trained
meanwhile. k = 1, time to the right:

    trainer          |  learn 0  |  learn 1  |  learn 2  | ...    takes batch t, gives version t + 1
    rollouts  roll 0 |  roll 1   |  roll 2   |  roll 3   | ...    takes version t - k, gives batch t
    weights   v0     |  v0       |  v1       |  v2       |

Rollouts have lanes, each a thread with Stages of its own. With k + 1 lanes (rollout/collect.py,
steps_at_once) step t begins as soon as version t - k is published, though episodes of step t - 1
may still run. They end in order: journal, running baseline and stream see one step after the other.

    trainer   get(t)                 waits for batch t; `_roll` or an error of the rollouts wakes it
              publish                never waits
    saver     wait_until_durable(v)  waits for the batches of weights older than v; the same wakes
                                     it, and `stop_soon`
    lane      _wait_for_weights      waits for version t - k; `publish` or `close` wakes it
              _turn                  waits for the end of rollouts t - 1; their lane wakes it, an
                                     error of a step before, or `close`

Without worker processes (rollout.workers = 0) the halves take turns: `get(t)` first rolls out all
steps up to t + k. The bits are the same, because a rollout sees the same weights and data.
Batches of weights that a resumed run no longer has stand in the journal: a checkpoint counts only
once they are durable (`wait_until_durable`).

    tandem train RECIPE rollout.staleness=1 rollout.workers=1 rl.correction=decoupled
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from tandem.rollout.checks import check_progress
from tandem.rollout.collect import Progress, RolloutBatch
from tandem.runtime import signals, watchdog
from tandem.runtime.errors import UserError
from tandem.runtime.timer import Timer
from tandem.step import Stages, learn_and_publish, rollout_step
from tandem.types import StepResult

LEAVE_S = 3.0  # for rollouts that a save waits for, and for their threads, once the run is left
POLL_S = 0.5


def train_step_async(prefetcher: "RolloutPrefetcher", step: int) -> StepResult:
    """Make step `step`, as train_step does, with a batch that was rolled out ahead of time."""
    stages, timer = prefetcher.stages, Timer()
    with timer("wait_s"):
        batch, rollout_timer = prefetcher.get(step)
    metrics = learn_and_publish(stages, batch, timer, prefetcher.publish)
    ahead = rollout_timer.timings(tokens=batch.num_tokens)
    speed = {"generated_tokens_per_s": ahead["generated_tokens_per_s"]}
    return StepResult(
        metrics=metrics,
        timings=rollout_timer.parts | rollout_timer.others | timer.timings(tokens=0) | speed,
        state=batch.state,
    )


class RolloutPrefetcher:
    """Rollouts of the steps in order, at most rollout.staleness ahead of the training; in threads
    if there are workers.

    stop_workers: ends the rollouts under way. lanes: the stages of each thread, which have their
    own engine and sync; by default one thread has those of the trainer.
    """

    def __init__(
        self,
        stages: Stages,
        num_steps: int,
        stop_workers: Callable[[], None] = lambda: None,
        lanes: Sequence[Stages] = (),
    ):
        self.stages, self.num_steps, self._stop_workers = stages, num_steps, stop_workers
        self.lanes = list(lanes) or [stages]
        self.staleness = stages.config.rollout.staleness
        self.threaded = stages.config.rollout.workers > 0
        self._ready: dict[int, tuple[RolloutBatch, Timer]] = {}
        self._next = self._version = 0  # the step whose rollouts end next; the weights published
        self._first_batch = 0  # of problems, of step 0 if each step draws one
        self._change = threading.Condition()
        self._failed: tuple[int, Exception] | None = None  # the first step with an error
        self._closed, self._deadline = False, math.inf
        self._threads: list[threading.Thread] = []

    def start(self, step: int) -> None:
        """Start at this step, whose weights are published already."""
        self._next = self._version = step
        self._first_batch = self.stages.collector.progress.batches - step
        if self.threaded:
            for first in range(step, step + len(self.lanes)):
                name, run = self._lane(first), partial(self._run, first)
                self._threads.append(threading.Thread(target=run, name=name, daemon=True))
            for thread in self._threads:
                thread.start()

    def publish(self, version: int) -> None:
        """Publish the trainer's weights as that version."""
        self.stages.sync.publish(version)
        with self._change:
            self._version = version
            self._change.notify_all()

    def get(self, step: int) -> tuple[RolloutBatch, Timer]:
        """Wait for the batch of a step. Raises the errors of its rollouts, or of earlier ones."""
        if not self.threaded:
            while self._next < min(step + self.staleness + 1, self.num_steps):
                self._roll(self._next)
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
        """End the rollouts, those under way too."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._stop_workers()
        until = time.monotonic() + LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _wait_for(self, step: int, until_deadline: bool = False) -> None:
        """Wait until the batch of a step is rolled out. Raises the errors of the rollouts."""
        waits = watchdog.waiting_for(self._lane(step), f"the episodes of step {step + 1}")
        with signals.allow_interrupts(), self._change, waits:
            while self._next <= step and not self._has_failed(step):
                if until_deadline and time.monotonic() > self._deadline:
                    break
                self._change.wait(POLL_S)
            if self._next <= step:
                if self._failed is not None:
                    raise self._failed[1]
                raise UserError(
                    "rollouts of older weights have not ended",
                    where=f"step {step + 1}",
                    found="none",
                    expected="its file in the journal",
                )

    def _has_failed(self, step: int) -> bool:
        return self._failed is not None and self._failed[0] <= step

    def _lane(self, step: int) -> str:
        """Name the thread of a step."""
        number = f" {step % len(self.lanes)}" if len(self.lanes) > 1 else ""
        return f"rollouts{number}"

    # The thread of a lane, or the trainer's own.

    def _run(self, first: int) -> None:
        """Roll out every step of a lane."""
        for step in range(first, self.num_steps, len(self.lanes)):
            try:
                if not self._wait_for_weights(step):
                    return
                self._roll(step)
            except Exception as error:  # raised again by `get`
                with self._change:
                    if not self._has_failed(step):
                        self._failed = step, error
                    self._change.notify_all()
                return

    def _wait_for_weights(self, step: int) -> bool:
        """Wait for the weights of a step's rollouts; return False if the run is over first."""
        version = max(0, step - self.staleness)
        with self._change, watchdog.waiting_for("trainer", f"the weights of version {version}"):
            self._change.wait_for(lambda: self._version >= version or self._is_over(step))
            return not self._is_over(step)

    def _roll(self, step: int) -> None:
        timer, stages, turn = Timer(), self.lanes[step % len(self.lanes)], None
        if len(self.lanes) > 1:
            collector, turn = stages.collector.beside(self._first_batch + step), self._turn(step)
            stages = replace(stages, collector=collector)
        batch = rollout_step(stages, step, timer, turn)
        with self._change:
            self._ready[step] = batch, timer
            self._next += 1
            self._change.notify_all()

    @contextmanager
    def _turn(self, step: int) -> Iterator[Progress]:
        """Wait until the rollouts of the steps before have ended; give the progress after them."""
        progress = self.stages.collector.progress
        waits = watchdog.waiting_for(self._lane(step - 1), f"the rollouts of step {step}")
        with self._change, waits:
            self._change.wait_for(lambda: self._next == step or self._is_over(step))
            if self._next != step:
                raise RuntimeError("the steps before have no rollouts")
        check_progress(progress, self.stages.journal, step)
        yield progress

    def _is_over(self, step: int) -> bool:
        return self._closed or self._has_failed(step)
