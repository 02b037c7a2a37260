"""One RL step on one page. READ THIS FIRST: `train_step`.

    rollout_step   problems -> episodes -> rewards -> journal   data, envs, engine, rollout, rewards
    put, take      the groups, to all who train                 stream
    learn_step     pack -> log-probs -> advantages -> updates   train, rl, model
    publish        the engines run the new weights              weights

train_loop.py repeats it, with resume, metrics, evaluation and checkpoints; step_async.py runs the
same two halves side by side. A step is a pure function of the config, the seed, the data, the
weights and the `Progress` of the steps before: killed anywhere and run again, the same bits come
out.

    tandem train recipes/demo.toml
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from tandem.rollout.checks import check_batch, check_groups, check_progress
from tandem.rollout.collect import Collector, RolloutBatch, Turn, step_metrics
from tandem.rollout.stream import MemoryStream, Stream
from tandem.run_folder.journal import Journal
from tandem.runtime import signals
from tandem.runtime.timer import Timer
from tandem.trainer.batch import compute_logprobs, not_finite, pack_batch
from tandem.trainer.learn import (
    SKIPPED,
    LearnStage,
    Observe,
    off_policy_weights,
    reduce_metrics,
    token_advantages,
    update_critic,
    update_policy,
)
from tandem.types import Row, StepResult, WeightSync


@dataclass(frozen=True, kw_only=True)
class Stages(LearnStage):
    """Everything a step needs, built once by jobs/rl.py."""

    collector: Collector
    sync: WeightSync
    stream: Stream = field(default_factory=MemoryStream)
    before_updates: Callable[[RolloutBatch], None] = lambda rollouts: None  # of each step

    @property
    def journal(self) -> Journal:
        return self.collector.journal


def train_step(stages: Stages, step: int) -> StepResult:
    """Make step `step`, counted from 0."""
    timer = Timer()
    rollouts = rollout_step(stages, step, timer)
    metrics = learn_and_publish(stages, rollouts, timer, stages.sync.publish)
    return StepResult(
        metrics=metrics, timings=timer.timings(tokens=rollouts.num_tokens), state=rollouts.state
    )


def rollout_step(stages: Stages, step: int, timer: Timer, turn: Turn | None = None) -> RolloutBatch:
    """Sample and score the groups of `step` with the weights of version `step - staleness`, and
    write them to the journal; if an earlier start of the run has written them, read them back.

    turn: waits for the ends of steps before it that may be under way, for their progress.
    """
    collector, journal = stages.collector, stages.journal
    if turn is None:
        check_progress(collector.progress, journal, step)
    if (recorded := journal.read(step + 1)) is None:
        with signals.allow_interrupts():
            with timer("apply_s"):
                stages.sync.sync_to(max(0, step - stages.config.rollout.staleness))
            recorded = collector.collect(step, timer), None
            timer.others.update(stages.sync.stats())
            with timer("check_s"):
                timer.others.update(stages.parity.after_rollout(collector.runner.engine, step))
    groups, state = recorded
    with turn or nullcontext(collector.progress) as progress:
        batch = collector.end_step(progress, step, groups, state, timer)
        return replace(batch, groups=stages.stream.put(step, batch.groups))


def learn_and_publish(
    stages: Stages, rollouts: RolloutBatch, timer: Timer, publish: Callable[[int], None]
) -> Row:
    """Learn from rollouts as they come out of the stream, publish, and return all metrics."""
    with timer("learn_s"):
        stages.before_updates(rollouts)
        groups = stages.stream.take(rollouts.step, rollouts.groups, stages.plan_share)
        metrics = learn_step(stages, replace(rollouts, groups=groups))
        stages.stream.clear(rollouts.step)
    with timer("sync_s"):
        stages.models.policy.publish()  # the whole model has what its parts learned
        publish(rollouts.step + 1)
    return step_metrics(rollouts, metrics, stages.config)


def learn_step(stage: LearnStage, rollouts: RolloutBatch, observe: Observe | None = None) -> Row:
    """Make all optimizer updates of a step; return its metrics.

    A quantity that is not finite is reported under "bad/" and never reaches a weight. observe:
    called with each microbatch of an update.
    """
    config, models, step = stage.config, stage.models, rollouts.step
    check_groups(rollouts, config.rl.max_truncated)
    check_batch(rollouts, config)
    if models.own_update is not None:
        return models.own_update(stage, rollouts.trained, step, observe)
    batch = pack_batch(rollouts.trained, config, models.policy.ranks)
    if not batch.sample_index:
        return dict(SKIPPED)
    compute_logprobs(batch, models, config.rl, stage.sampling)
    batch.advantages, batch.returns = token_advantages(batch, config, rollouts.baseline)
    if bad := not_finite(batch):
        return {**SKIPPED, **bad}
    metrics = stage.parity.before_update(batch, models.policy, step)
    metrics |= off_policy_weights(batch, config.rl)
    rows: list[Row] = []
    trains_policy = models.critic is None or step >= config.critic.warmup_steps
    for number, minibatch in enumerate(batch.minibatches * config.rl.epochs):
        row: Row = {"num_loss_tokens": sum(len(b.targets) for b in minibatch)}
        if trains_policy:
            row = update_policy(stage, batch, minibatch, step, first=number == 0, observe=observe)
        if models.critic is not None:
            critic = update_critic(models.critic, batch, minibatch, config.critic.value_clip)
            row |= {n if n.startswith("bad/") else f"critic/{n}": v for n, v in critic.items()}
        rows.append(row)
    return {**metrics, **reduce_metrics(rows)}
