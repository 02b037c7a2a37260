"""Collection of a step's scored groups: new problems, groups carried from earlier steps, and
episodes that were paused.

Dynamic sampling (DAPO, arXiv 2503.14476) leaves out groups whose rewards are all equal and draws
more problems until the step is full. With a token budget (partial rollouts) an episode may take
several steps. Knows no weights and no loss.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from tandem.config.schema import Config
from tandem.data.mixture import problems_of_step
from tandem.rl.advantages import running_mean, sampled_lengths
from tandem.rl.filters import learnability, pick
from tandem.rollout.episode_builder import new_groups
from tandem.rollout.episode_metrics import (
    carries_signal,
    episode_metrics,
    staleness_metrics,
    valid_rewards,
)
from tandem.rollout.score import RolloutRunner, generate_and_score
from tandem.run_folder.journal import Journal
from tandem.runtime.errors import UserError
from tandem.runtime.rng import address, uniforms
from tandem.runtime.timer import Timer
from tandem.types import Group, Problem, Row, SamplingParams


@dataclass(kw_only=True)
class Progress:
    """State that the rollouts of a step leave to those of the next.

    The groups are kept in the journal; all else is in checkpoints and in the journal's notes.
    """

    batches: int = 0  # batches of problems drawn so far: the data cursor
    baseline: float | None = None  # running mean of rewards, where rl.advantage keeps one
    # uid -> last success rate (rl.curriculum)
    rates: dict[str, float] = field(default_factory=dict)
    carried: list[Group] = field(default_factory=list)  # groups that no step had room for yet
    unfinished: list[Group] = field(default_factory=list)  # groups with paused episodes

    def state(self) -> dict[str, Any]:
        """Return all but the groups, as JSON."""
        return {"batches": self.batches, "baseline": self.baseline, "rates": dict(self.rates)}

    def restore(self, state: dict[str, Any], groups: Sequence[Group]) -> None:
        """Go back to the state of a step after it had rolled out these groups."""
        self.batches, self.baseline = state["batches"], state["baseline"]
        self.rates = dict(state["rates"])
        self.keep(groups)

    def keep(self, groups: Sequence[Group]) -> None:
        """Keep the groups of a step that the next one goes on with."""
        self.carried = [group for group in groups if group.outcome == "carry"]
        self.unfinished = [group for group in groups if group.outcome == "unfinished"]

    def advance(self, groups: Sequence[Group], num_carried: int, config: Config) -> None:
        """Update the running baseline and the success rates by a step's groups.

        The first `num_carried` groups were counted when they were sampled. Rewards that are not
        finite are skipped.
        """
        self.keep(groups)
        rewards = valid_rewards([group for group in groups if group.outcome == "train"])
        if config.rl.estimator.keeps_baseline and len(rewards) and np.isfinite(rewards).all():
            self.baseline = running_mean(self.baseline, rewards, config.rl.ema_decay)
        if config.rl.curriculum:
            ended = [g for g in groups[num_carried:] if g.outcome != "unfinished" and g.valid.any()]
            rates = {group.problem.uid: float(group.rewards.mean()) for group in ended}
            self.rates |= {
                uid: min(max(rate, 0.0), 1.0) for uid, rate in rates.items() if np.isfinite(rate)
            }


# Waits until the steps before have ended, and gives the progress that they have left.
Turn = AbstractContextManager[Progress]


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """The groups of a step. The metrics are apart, because a stream may carry the groups on."""

    step: int  # counted from 0
    groups: list[Group]  # all that the step's journal file holds
    num_carried: int  # the first groups, which an earlier step sampled
    baseline: float  # running mean of rewards before the step
    state: dict[str, Any]  # of the Progress after the step
    metrics: Row = field(default_factory=dict)  # of `logged`, as it was rolled out
    staleness: Row = field(default_factory=dict)  # of `trained`, as it was rolled out
    num_tokens: int = 0  # sampled, of the groups that ended in this step

    @property
    def fresh(self) -> list[Group]:
        """Groups that ended in this step."""
        return [g for g in self.groups[self.num_carried :] if g.outcome != "unfinished"]

    @property
    def trained(self) -> list[Group]:
        """Groups that the step trains on."""
        return [group for group in self.groups if group.outcome == "train"]

    @property
    def logged(self) -> list[Group]:
        """Groups that the step's metrics describe: those that ended now, or, if none did (partial
        rollouts), those that it trains on."""
        return self.fresh or self.trained


def make_rollout_batch(
    step: int, groups: list[Group], num_carried: int, baseline: float | None, progress: Progress
) -> RolloutBatch:
    """Bundle the groups of a step. baseline: from before the step, None if it is the first;
    progress: after the step."""
    if baseline is None:
        rewards = valid_rewards([group for group in groups if group.outcome == "train"])
        baseline = float(rewards.mean()) if len(rewards) else 0.0
    batch = RolloutBatch(
        step=step, groups=groups, num_carried=num_carried, baseline=baseline, state=progress.state()
    )
    return replace(
        batch,
        metrics=episode_metrics(batch.logged),
        staleness=staleness_metrics(batch.trained, step),
        num_tokens=sum(int(e.loss_mask.sum()) for group in batch.fresh for e in group.episodes),
    )


def step_metrics(batch: RolloutBatch, learned: Row, config: Config) -> Row:
    """Return a step's row of metrics: its episodes, the learning from them, where tokens may be of
    older weights their staleness, and with dynamic sampling the batches drawn so far and the groups
    carried in."""
    row = {**batch.metrics, **learned}
    if config.rollout.staleness or config.rollout.token_budget or config.rl.max_gen_batches:
        row |= batch.staleness
    if config.rl.max_gen_batches:
        row["batches"] = float(batch.state["batches"])
        row["groups/carried_in"] = float(batch.num_carried)
    return row


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Collector of groups: draws problems, has them rolled out, decides which are trained on."""

    config: Config
    problems: Sequence[Problem]
    runner: RolloutRunner
    sampling: SamplingParams
    journal: Journal
    progress: Progress = field(default_factory=Progress)
    beside_others: bool = False  # steps before it may be under way

    def beside(self, batches: int) -> "Collector":
        """Return the collector of a step that begins after so many batches of problems, while steps
        before it may be under way (`steps_at_once`)."""
        return replace(self, progress=Progress(batches=batches), beside_others=True)

    def collect(self, step: int, timer: Timer) -> list[Group]:
        """Return the scored groups of a step: those of one batch of problems, all of them trained
        on, unless dynamic sampling or partial rollouts say when a step is full."""
        if self.config.rl.max_gen_batches or self.config.rollout.token_budget:
            return self._collect_until_full(step, timer)
        # beside others the step's own file does not follow at once
        played = self._play(step, 0, self.begin_batch(), timer, last=not self.beside_others)
        return [replace(group, outcome="train") for group in played]

    def _collect_until_full(self, step: int, timer: Timer) -> list[Group]:
        """Return the scored groups of a step, the carried ones first.

        Batches of problems begin, and episodes go on, tick by tick, until enough groups can be
        trained on. Groups beyond that have the outcome "carry", groups with paused episodes
        "unfinished", groups without signal "no_signal" (dynamic sampling). Raises UserError if
        rl.max_gen_batches batches do not fill the step.
        """
        config, progress = self.config, self.progress
        wanted, budget = config.rl.prompts_per_step, config.rollout.token_budget
        done = [replace(group, outcome="train") for group in progress.carried]
        running, first_batch = list(progress.unfinished), progress.batches
        for tick in count():
            num_ready = sum(group.outcome == "train" for group in done)
            if num_ready >= wanted and (tick or not budget):
                break
            # one batch begins, or as many as there is room for beside the groups under way
            size, under_way = _batches_in_flight(config) * wanted, num_ready + len(running)
            for _ in range(max((size - under_way) // wanted, 0) if budget else 1):
                self._check_limit(step, progress.batches - first_batch, num_ready)
                running += self.begin_batch()
            played = self._play(step, tick, running, timer)
            running = [group for group in played if _is_paused(group)]
            for group in played:
                if _is_paused(group):
                    continue
                is_kept = not config.rl.max_gen_batches or carries_signal(group)
                if config.rl.max_gen_batches and config.rl.filter:
                    from tandem.rl.user_functions import user_filter

                    lengths = sampled_lengths([group])[0]
                    is_kept = user_filter(config.rl.filter, group.rewards, lengths)
                done.append(replace(group, outcome="train" if is_kept else "no_signal"))
        ranks = np.cumsum([group.outcome == "train" for group in done])
        ended = [
            replace(group, outcome="carry") if rank > wanted and group.outcome == "train" else group
            for group, rank in zip(done, ranks, strict=True)
        ]
        return [*ended, *(replace(group, outcome="unfinished") for group in running)]

    def _play(
        self, step: int, tick: int, groups: list[Group], timer: Timer, last: bool = False
    ) -> list[Group]:
        """Have the paused episodes of groups played and scored; last: they end the step."""
        with self.journal.parts(step + 1, tick, [group.problem for group in groups], last) as parts:
            return generate_and_score(
                self.runner,
                groups,
                sampling=self.sampling,
                shaping=self.config.reward,
                timer=timer,
                token_budget=self.config.rollout.token_budget,
                parts=parts,
            )

    def end_step(
        self, progress: Progress, step: int, groups: list[Group], state: Any, timer: Timer
    ) -> RolloutBatch:
        """Write the groups of a step to the journal and let the progress go on; those that were
        read from the journal come with their state instead of None."""
        num_carried, baseline = len(progress.carried), progress.baseline
        if state is not None:
            progress.restore(state, groups)
        else:
            progress.batches = self.progress.batches
            progress.advance(groups, num_carried, self.config)
            with timer("journal_s"):
                self.journal.write(step + 1, groups, state=progress.state())
        return make_rollout_batch(step, groups, num_carried, baseline, progress)

    def begin_batch(self) -> list[Group]:
        """Draw the next batch of problems, as groups whose episodes have not begun.

        The batch is a function of the seed and the batch's number; with rl.curriculum also of the
        success rates so far.
        """
        config, progress = self.config, self.progress
        size, seed, number = config.rl.prompts_per_step, config.run.seed, progress.batches
        if config.rl.curriculum:
            rates = np.array([progress.rates.get(problem.uid, 0.5) for problem in self.problems])
            key = np.full(len(rates), address(seed, "curriculum", number), np.uint64)
            chances = 1.0 - uniforms(key, np.arange(len(rates))).astype(np.float64)
            problems = [self.problems[i] for i in pick(learnability(rates), chances, size)]
        else:
            problems = problems_of_step(self.problems, number, size, seed, config.data.shuffle)
        progress.batches += 1
        return new_groups(problems, config.rl.group_size, (seed, "rollout", number))

    def _check_limit(self, step: int, drawn: int, num_ready: int) -> None:
        """Raise UserError if dynamic sampling has used up rl.max_gen_batches; partial rollouts may
        begin a few more in their first step."""
        limit = self.config.rl.max_gen_batches
        if limit and drawn >= limit + _batches_in_flight(self.config) - 1:
            raise UserError(
                "dynamic sampling could not fill a step",
                where=f"step {step + 1}, after {drawn} batches (rl.max_gen_batches)",
                found=f"{num_ready} groups whose rewards differ",
                expected=f"{self.config.rl.prompts_per_step} (rl.prompts_per_step)",
                next="raise rl.max_gen_batches, lower rl.prompts_per_step, or take problems that "
                "are neither solved nor hopeless",
            )


def steps_at_once(config: Config) -> int:
    """Return how many steps may be rolled out at once: staleness + 1, each as soon as its weights
    are published.

    One after the other are those that need what the step before leaves: dynamic sampling
    (`carried`, and how many batches it drew), partial rollouts (`unfinished`) and a curriculum
    (`rates`). Any other step draws one batch, whose number is known beforehand. The running
    baseline needs the rewards of the steps before, but only when a step ends.
    """
    needs_last = config.rl.max_gen_batches or config.rollout.token_budget or config.rl.curriculum
    return 1 if needs_last or not config.rollout.workers else 1 + config.rollout.staleness


def _batches_in_flight(config: Config) -> int:
    """Return how many batches are under way at once, so that one ends in every step although an
    episode may span several (partial rollouts)."""
    if not config.rollout.token_budget:
        return 1
    return max(2, -(-config.rollout.max_new_tokens // config.rollout.token_budget))


def _is_paused(group: Group) -> bool:
    return any(episode.stop_reason == "paused" for episode in group.episodes)
