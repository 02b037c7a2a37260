"""One synchronous RL step on one page. READ THIS FIRST: `train_step`.

    problems -> episodes -> rewards -> journal -> advantages -> updates -> publish
    data        envs       rewards    stream     rl            train      weights
                engine
    `roll`: what a step trains on                `update`: what it makes of it

`drive` repeats it, with metrics, evaluation and checkpoints between the steps; step_async.py calls
the same stages ahead of time. A step is a pure function of the config, the seed, the data, the
weights and the `Progress` of the steps before: killed anywhere and run again, the same bits come
out.

    tandem train recipes/demo.toml
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from tandem.config.schema import Config
from tandem.data.mixture import problems_of_step
from tandem.model.logprobs import SamplingDistribution
from tandem.rl.advantages import running_mean
from tandem.rl.filters import learnability, pick
from tandem.rollout.episode_builder import new_groups
from tandem.rollout.episode_metrics import (
    TRUNCATED,
    carries_signal,
    episode_metrics,
    sampled_tokens,
    valid_rewards,
)
from tandem.rollout.score import RolloutRunner, Timer, generate_and_score
from tandem.run_folder.episode_files import episode_file, read_note
from tandem.run_folder.journal import Journal
from tandem.runtime import signals
from tandem.runtime.errors import InvariantError, UserError
from tandem.runtime.rng import address, uniforms
from tandem.train.distill import distill
from tandem.train.learn import Models, Observe, learn
from tandem.types import Group, Problem, Row, SamplingParams, Sync


@dataclass(kw_only=True)
class Progress:
    """What the rollouts of a step leave to those of the next. All but the groups is in checkpoints
    and journal notes; the groups are in the journal's files."""

    batches: int = 0  # batches of problems drawn: the data cursor
    baseline: float | None = None  # running mean of rewards, for rl.advantage "ema"
    # uid -> its last success rate, for rl.curriculum
    rates: dict[str, float] = field(default_factory=dict)
    carried: list[Group] = field(default_factory=list)  # groups that no step had room for yet
    # groups with paused episodes (rollout.token_budget)
    unfinished: list[Group] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """All but the groups, as JSON."""
        return {"batches": self.batches, "baseline": self.baseline, "rates": dict(self.rates)}

    def restore(self, state: dict[str, Any], groups: Sequence[Group]) -> None:
        """To where it stood when a step had rolled out these groups."""
        self.batches, self.baseline, self.rates = (
            state["batches"],
            state["baseline"],
            dict(state["rates"]),
        )
        self.keep(groups)

    def keep(self, groups: Sequence[Group]) -> None:
        self.carried = [group for group in groups if group.outcome == "carry"]
        self.unfinished = [group for group in groups if group.outcome == "unfinished"]


@dataclass(frozen=True, kw_only=True)
class Learning:
    """What an update needs; audit/replay.py has it without what rolls out."""

    config: Config
    models: Models
    params: SamplingParams  # of training rollouts
    exact: bool  # the engine has been found to keep P1 here, so the policy is held to it


@dataclass(frozen=True, kw_only=True)
class Stages(Learning):
    """What a step needs, built once by jobs.training_job."""

    problems: Sequence[Problem]
    player: RolloutRunner
    sync: Sync
    journal: Journal
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """What the rollouts of a step came to."""

    step: int
    groups: list[Group]  # all of the step's file in the journal
    fresh: list[Group]  # those that ended in this step
    baseline: float  # the running mean before it
    state: dict[str, Any]  # of the Progress after it
    tokens: int  # sampled, of the fresh ones

    @property
    def told(self) -> list[Group]:
        """Those that the step's metrics describe; of partial rollouts a step may see no group
        end."""
        return self.fresh or self.trained

    @property
    def trained(self) -> list[Group]:
        return [group for group in self.groups if group.outcome == "train"]


Update = Callable[[Learning, RolloutBatch], Row]


def train_step(stages: Stages, step: int, update: Update) -> tuple[Row, Row, dict[str, Any]]:
    """Step `step`, counted from 0. Returns its metrics, which are a pure function of the run, its
    timings, and the state of the Progress after it."""
    clock = Timer()
    rolled = roll(stages, step, clock)
    with clock("learn_s"):
        metrics = update(stages, rolled)
    with clock("sync_s"):
        stages.sync.publish(step + 1)
    return (
        {**episode_metrics(rolled.told), **metrics},
        clock.timings(tokens=rolled.tokens),
        rolled.state,
    )


def roll(stages: Stages, step: int, clock: Timer) -> RolloutBatch:
    """What step `step` trains on, sampled by the weights that its turn is (rollout.staleness),
    scored, and durable in the journal before anything is trained on it; read back from there if an
    earlier start of the run has come as far."""
    progress, journal = stages.progress, stages.journal
    check_progress(progress, journal, step)
    carried, baseline = len(progress.carried), progress.baseline
    if (known := journal.read(step + 1)) is not None:
        groups, state = known
        progress.restore(state, groups)
    else:
        with signals.interruptible():
            stages.sync.sync_to(max(0, step - stages.config.rollout.staleness))
            groups = collect(stages, step, clock)
            if stages.exact:
                with clock("check_s"):
                    check_sampled(stages.sync, step)
        advance(progress, groups, carried, stages.config)
        with clock("journal_s"):
            journal.write(step + 1, groups, state=progress.state())
    return make_rollout_batch(step, groups, carried, baseline, progress.state())


def make_rollout_batch(
    step: int, groups: list[Group], carried: int, baseline: float | None, state: dict[str, Any]
) -> RolloutBatch:
    """Of the groups of a step, the first `carried` of an earlier one; baseline: of the Progress
    before it, state: after it."""
    fresh = [group for group in groups[carried:] if group.outcome != "unfinished"]
    rewards = valid_rewards([group for group in groups if group.outcome == "train"])
    first = float(rewards.mean()) if len(rewards) else 0.0
    return RolloutBatch(
        step=step,
        groups=groups,
        fresh=fresh,
        baseline=first if baseline is None else baseline,
        state=state,
        tokens=sampled_tokens(fresh),
    )


def update(stages: Learning, rolled: RolloutBatch, observe: Observe | None = None) -> Row:
    """Reinforcement learning on the step's groups."""
    config, step = stages.config, rolled.step
    check_groups(rolled, config.rl.max_truncated)
    check_batch(rolled, config)
    metrics = learn(
        stages.models,
        rolled.trained,
        config,
        SamplingDistribution.of(stages.params),
        version=step,
        baseline=rolled.baseline,
        exact=stages.exact,
        train_policy=stages.models.critic is None or step >= config.critic.warmup_steps,
        observe=observe,
    )
    if not config.rl.max_gen_batches:
        return metrics
    carried = float(
        len(rolled.groups)
        - len(rolled.fresh)
        - sum(g.outcome == "unfinished" for g in rolled.groups)
    )
    return {**metrics, "batches": float(rolled.state["batches"]), "groups/carried_in": carried}


def distill_step(stages: Learning, rolled: RolloutBatch, observe: Observe | None = None) -> Row:
    """The same with a teacher in place of the reward, which is only reported."""
    teacher = stages.models.teacher
    assert teacher is not None, "jobs.distill_job gives one"
    check_groups(rolled, stages.config.rl.max_truncated)
    check_batch(rolled, stages.config)
    return distill(
        stages.models.policy,
        teacher,
        rolled.trained,
        stages.config,
        SamplingDistribution.of(stages.params),
        version=rolled.step,
        exact=stages.exact,
        observe=observe,
    )


def collect(stages: Stages, step: int, clock: Timer) -> list[Group]:
    """The step's groups, scored, the carried ones first. Batches of problems are begun and episodes
    go on, tick by tick, until the step is full; with dynamic sampling groups without signal do not
    count. What it has no room for is carried."""
    rl, progress, budget = stages.config.rl, stages.progress, stages.config.rollout.token_budget
    done = [replace(group, outcome="train") for group in progress.carried]
    under_way, first_batch = list(progress.unfinished), progress.batches
    for tick in count():
        ready = sum(group.outcome == "train" for group in done)
        if ready >= rl.prompts_per_step and (tick or not budget):
            break
        room = batches_under_way(stages.config) * rl.prompts_per_step - ready - len(under_way)
        for _ in range(max(room // rl.prompts_per_step, 0) if budget else 1):
            _check_batches(
                rl.max_gen_batches, progress.batches - first_batch, step, ready, stages.config
            )
            under_way += begin_batch(stages)
        last = not (budget or rl.max_gen_batches)
        with stages.journal.parts(
            step + 1, tick, [group.problem for group in under_way], last
        ) as parts:
            played = generate_and_score(
                stages.player,
                under_way,
                params=stages.params,
                shaping=stages.config.reward,
                clock=clock,
                budget=budget,
                parts=parts,
            )
        under_way = [group for group in played if _is_paused(group)]
        done += [_with_outcome(group, stages.config) for group in played if not _is_paused(group)]
    full = np.cumsum([group.outcome == "train" for group in done]) > rl.prompts_per_step
    return [
        *(
            replace(g, outcome="carry") if late and g.outcome == "train" else g
            for g, late in zip(done, full, strict=True)
        ),
        *(replace(group, outcome="unfinished") for group in under_way),
    ]


def batches_under_way(config: Config) -> int:
    """Of partial rollouts: so many that a batch is done in each step although an episode may take
    several."""
    if not config.rollout.token_budget:
        return 1
    return max(2, -(-config.rollout.max_new_tokens // config.rollout.token_budget))


def _is_paused(group: Group) -> bool:
    return any(episode.stop_reason == "paused" for episode in group.episodes)


def _with_outcome(group: Group, config: Config) -> Group:
    return replace(
        group,
        outcome="no_signal" if config.rl.max_gen_batches and not carries_signal(group) else "train",
    )


def _check_batches(limit: int, drawn: int, step: int, ready: int, config: Config) -> None:
    """The first step of partial rollouts begins more than one batch for itself."""
    if limit and drawn >= limit + batches_under_way(config) - 1:
        raise UserError(
            "dynamic sampling could not fill a step",
            where=f"step {step + 1}, after {drawn} batches (rl.max_gen_batches)",
            found=f"{ready} groups whose rewards differ",
            expected=f"{config.rl.prompts_per_step} (rl.prompts_per_step)",
            next="raise rl.max_gen_batches, lower rl.prompts_per_step, or take problems that are neither solved nor hopeless",
        )


def begin_batch(stages: Stages) -> list[Group]:
    """The next batch of problems, their episodes not begun."""
    config, progress = stages.config, stages.progress
    count, seed = config.rl.prompts_per_step, config.run.seed
    if config.rl.curriculum:
        rates = np.array([progress.rates.get(problem.uid, 0.5) for problem in stages.problems])
        key = np.full(len(rates), address(seed, "curriculum", progress.batches), np.uint64)
        chances = 1.0 - uniforms(key, np.arange(len(rates))).astype(np.float64)
        problems = [stages.problems[i] for i in pick(learnability(rates), chances, count)]
    else:
        problems = problems_of_step(
            stages.problems, progress.batches, count, seed, config.data.shuffle
        )
    groups = new_groups(problems, config.rl.group_size, (seed, "rollout", progress.batches))
    progress.batches += 1
    return groups


def advance(progress: Progress, groups: Sequence[Group], carried: int, config: Config) -> None:
    """What the next step is to know of this one, whose first `carried` groups an earlier one has
    told of; rewards that are not finite are no statistics."""
    progress.keep(groups)
    rewards = valid_rewards([group for group in groups if group.outcome == "train"])
    if config.rl.advantage == "ema" and len(rewards) and np.isfinite(rewards).all():
        progress.baseline = running_mean(progress.baseline, rewards, config.rl.ema_decay)
    if config.rl.curriculum:
        ended = [
            group
            for group in groups[carried:]
            if group.outcome != "unfinished" and group.valid.any()
        ]
        means = {group.problem.uid: float(group.rewards.mean()) for group in ended}
        progress.rates |= {
            uid: min(max(mean, 0.0), 1.0) for uid, mean in means.items() if np.isfinite(mean)
        }


def check_groups(rolled: RolloutBatch, most_cut: float) -> None:
    """Raises UserError where an episode stands with another problem or another prompt than its
    group, which nothing would show in the loss; and where a share above most_cut was cut, as such a
    run learns nothing but to be cut."""
    for group in rolled.trained:
        first = next((e for e in group.episodes if e.trainable), group.episodes[0])
        for number, episode in enumerate(group.episodes):
            prompt, other = (e.tokens[: e.num_prompt_tokens] for e in (episode, first))
            if (episode.uid, episode.sample_index) != (group.problem.uid, number) or not (
                np.array_equal(prompt, other) or not episode.trainable or not first.trainable
            ):
                raise InvariantError(
                    "an episode is not of the problem it is trained for",
                    where=f"step {rolled.step + 1}",
                    found=f"sample {episode.sample_index} of {episode.uid}, with {len(prompt)} prompt tokens",
                    expected=f"sample {number} of {group.problem.uid}, with the prompt of the others",
                    next="report this; the journal has the episodes",
                )
    cut = [episode.stop_reason in TRUNCATED for group in rolled.fresh for episode in group.episodes]
    share = sum(cut) / max(len(cut), 1)
    if share > most_cut:
        raise UserError(
            "too many completions were cut",
            where=f"step {rolled.step + 1}",
            found=f"{share:.0%} of them",
            expected=f"at most {most_cut:.0%} (rl.max_truncated)",
            next="raise rl.max_truncated and go on, or rollout.max_new_tokens in a new run.folder",
        )


def check_batch(rolled: RolloutBatch, config: Config) -> None:
    """Raises UserError where a step would train other tokens than its own: not all episodes, not
    what was sampled of them, or what other weights sampled."""
    version, fresh = (
        max(0, rolled.step - config.rollout.staleness),
        {id(group) for group in rolled.fresh},
    )
    sizes = [len(group.episodes) for group in rolled.trained]
    whole = [config.rl.group_size] * config.rl.prompts_per_step
    wrong = [] if sizes == whole else [f"groups of {sizes} episodes, not {whole}"]
    for group in rolled.trained:
        # others began under older weights
        exactly = id(group) in fresh and not config.rollout.token_budget
        for e in group.episodes:
            sampled = e.weight_versions[e.weight_versions >= 0]
            if not np.array_equal(e.loss_mask, e.weight_versions >= 0):
                wrong.append(
                    f"{e.uid}, sample {e.sample_index}: loss on {e.loss_mask.sum()} of {len(sampled)} sampled tokens"
                )
            if (sampled > version).any() or (exactly and (sampled < version).any()):
                wrong.append(
                    f"{e.uid}, sample {e.sample_index}: tokens of versions {np.unique(sampled)}, not {version}"
                )
    if wrong:
        raise InvariantError(
            "a step would train other tokens than its own",
            where=f"step {rolled.step + 1}",
            found=wrong[0],
            expected="every token that its weights sampled, and no other",
            next="report this; the journal has the episodes",
        )


def check_sampled(sync: Sync, step: int) -> None:
    """Raises UserError where the rollouts' engine and the trainer's packed pass differ on a
    completion that the engine has just sampled, while it still runs those weights. An update
    compares the tokens that are of its own weights, and no others."""
    gap = sync.logprob_gap()
    if gap != 0.0:
        raise InvariantError(
            "engine and trainer do not agree on a completion just sampled",
            where=f"rollouts of step {step + 1}",
            found=f"log-probs that differ by {gap:.3g} nats",
            expected="exactly 0 (P1): one model code",
            next="tandem doctor, and report this; the last checkpoint and the journal are as they were",
        )


def check_progress(progress: Progress, journal: Journal, step: int) -> None:
    """Raises UserError where the rollouts would not go on from where those of the step before
    ended: a part of the data would be skipped or repeated, and nothing would show it."""
    note = read_note(episode_file(journal.folder, step))
    if note is not None and note["run"] == journal.run and note["state"] != progress.state():
        raise InvariantError(
            "the rollouts do not go on where they ended",
            where=f"step {step + 1}",
            found=f"{progress.batches} batches of problems drawn before it",
            expected=f"{note['state']['batches']}, and the rest as the journal of step {step} has it",
            next="report this; the last checkpoint and the journal are as they were",
        )
