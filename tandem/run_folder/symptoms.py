"""Symptoms of a training that goes wrong, each with the key to turn: pure functions over its newest
rows, in order, each the metrics of a step with its timings.

docs/guide/warnings.md has the thresholds below. It does not know how the numbers come about.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean, median
from typing import Literal

from tandem.types import Row

HISTORY = 50  # rows to look back
RECENT = 5  # rows that count as now, and at the begin of the history as before
FLAT_GROUPS = 0.9  # share of the groups
SOLVED = 0.9  # reward
FLAT_STEPS = 2  # so many are enough at the begin
FALLEN_REWARD = 0.2
SAME_REWARD = 0.05  # a rise of less is none
COLLAPSED_ENTROPY = 0.2  # of the entropy before
GROWN_LENGTH = 2.0  # times the length before
TRUNCATED = 0.5  # share of the completions
ENGINE_GAP = 0.02  # nats, the mean of an engine that is not Tandem's
WAITING = 0.5  # share of a step
STUCK_STEPS, MOVED_LOSS = 10, 1e-3  # steps after the warm-up; share of the first loss

Rows = Sequence[Row]
OfStep = Literal["skipped_update", "unscored", "failed_environments", "truncated", "inexact_engine"]
OfTrend = Literal["no_signal", "falling_reward", "entropy_collapse", "length_explosion"]
Name = Literal[OfStep, OfTrend, "starved_trainer", "starved_engine", "stuck_pairs"]
Found = Iterator[tuple[Name, str]]  # a symptom, and its warning
EPISODE_ERRORS = ("unscored", "failed_environments")  # symptoms with an error in episodes


def symptoms(rows: Rows) -> Mapping[str, str]:
    """Return the warning of each symptom that the newest HISTORY rows show, by its name."""
    newest = rows[-HISTORY:]
    groups = (of_last_step, of_engine, of_rewards, of_texts, of_waits, of_pairs)
    return dict(chain.from_iterable(group(newest) for group in groups if newest))


def of_last_step(rows: Rows) -> Found:
    row = rows[-1]
    if bad := sorted(name.removeprefix("bad/") for name in row if name.startswith("bad/")):
        keys = "a lower train.learning_rate or train.max_grad_norm may help"
        yield "skipped_update", f"an update was skipped, not finite: {', '.join(bad)}; {keys}"
    worst = "tandem show RUN --worst has their errors; if they took too long, take a larger"
    if count := row.get("reward_errors", 0):
        what = f"{count:.0f} episodes could not be scored and have the reward 0"
        yield "unscored", f"{what}; {worst} reward.timeout_s"
    if count := row.get("env_errors", 0) + row.get("env_timeouts", 0):
        what = f"{count:.0f} episodes failed in their environment"
        yield "failed_environments", f"{what}; {worst} env.timeout_s"
    if row.get("truncated", 0) > TRUNCATED:
        limit = "rollout.max_new_tokens"
        yield "truncated", f"over half of the completions hit {limit}; take a larger one"


def of_engine(rows: Rows) -> Found:
    """Look at the gap that is 0 for Tandem's engine; other engines have a mean of their own."""
    row, gap = rows[-1], _now(rows, "logprob_gap_mean")
    if row.get("logprob_gap", 0) != 0 and "logprob_gap_mean" not in row:
        what = "engine and trainer disagree: logprob_gap is not 0; `tandem doctor` says where"
        yield "inexact_engine", f"{what}, rl.correction=tis weighs it"
    elif gap is not None and gap > ENGINE_GAP:
        yield (
            "inexact_engine",
            f"the engine's log-probs are {gap:.2g} nats off in the mean (logprob_gap_mean); "
            "rl.correction=tis weighs it, an exact model with Tandem's engine has none",
        )


def of_rewards(rows: Rows) -> Found:
    """Look at the newest rows; before there are RECENT, at a begin without any signal."""
    flat = _now(rows, "groups_without_signal")
    if flat is None and len(rows) >= FLAT_STEPS:
        flat = min(row.get("groups_without_signal", 0.0) for row in rows)
    if flat is not None and flat > FLAT_GROUPS:
        reward = fmean(_values(rows[-RECENT:], "reward") or [0.0])
        if reward >= SOLVED:
            advice = ": solved, where 1 is the best; take harder problems in data.train, or stop"
        elif reward <= 0:
            easier = "warm up by tandem sft, or take easier problems in data.train"
            advice = f": none was solved; {easier}"
        else:
            advice = (
                ", so nothing to learn from: take problems that are sometimes solved, a larger "
                "rl.group_size, or rl.max_gen_batches"
            )
        equal = f"over {FLAT_GROUPS:.0%} of the groups have equal rewards"
        yield "no_signal", f"{equal}, with a mean of {reward:.3g}{advice}"
    rewards = _values(rows, "reward")
    means = [fmean(rewards[i : i + RECENT]) for i in range(len(rewards) - RECENT + 1)]
    if means and means[-1] < max(means) - FALLEN_REWARD:
        what = f"the reward is falling, {max(means):.2f} -> {means[-1]:.2f}"
        keys = "a lower train.learning_rate or more rl.prompts_per_step may help"
        yield "falling_reward", f"{what}: {keys}"


def of_texts(rows: Rows) -> Found:
    """Compare with the rows before; a change while the reward rises is learning."""
    before, now = _before(rows, "reward"), _now(rows, "reward")
    if before is None or now is None or now >= before + SAME_REWARD:
        return
    before, now = _before(rows, "entropy"), _now(rows, "entropy")
    if before is not None and now is not None and now <= COLLAPSED_ENTROPY * before:
        what = f"the entropy has collapsed, {before:.2g} -> {now:.2g}, and the reward does not rise"
        keys = "a larger rl.clip_high, rl.entropy_coef, or a lower train.learning_rate"
        yield "entropy_collapse", f"{what}: {keys}"
    before, now = _before(rows, "completion_tokens"), _now(rows, "completion_tokens")
    if before is not None and now is not None and now >= GROWN_LENGTH * before:
        what = f"completions grow, {before:.0f} -> {now:.0f} tokens, and the reward does not rise"
        keys = "reward.overlong_penalty, or rl.aggregation=token_mean"
        yield "length_explosion", f"{what}: {keys}"


def of_waits(rows: Rows) -> Found:
    """Look at rollouts beside the training; without workers the wait has the rollout in it."""
    waits, steps, rollouts = (_median(rows, name) for name in ("wait_s", "step_s", "rollout_s"))
    if waits >= rollouts:
        return
    if waits > WAITING * steps:
        what = f"the trainer waits for rollouts in {waits / steps:.0%} of the time"
        yield "starved_trainer", f"{what}: more rollout.workers, or a larger rollout.staleness"
    if rollouts < WAITING * steps and "wait_s" in rows[-1]:
        yield (
            "starved_engine",
            f"the rollout workers are idle in {1 - rollouts / steps:.0%} of the time: fewer "
            "rollout.workers leave cores to the trainer, a larger rollout.staleness lets them go "
            "on",
        )


def of_pairs(rows: Rows) -> Found:
    """Look at the first steps of learning from pairs, once the learning rate is at its peak: at one
    too small for the model the loss stays at ln 2 = 0.693."""
    losses, rates = _values(rows, "loss"), _values(rows, "learning_rate")
    if "accuracy" not in rows[-1] or len(rows) == HISTORY or not losses or not rates:
        return
    warmed_up = len(rates) - rates.index(max(rates)) >= STUCK_STEPS
    moved = max(abs(loss - losses[0]) for loss in losses) >= MOVED_LOSS * abs(losses[0])
    if warmed_up and not moved:
        cause = "preference.learning_rate is probably too small for this model"
        yield "stuck_pairs", f"the loss is still {losses[0]:.3f} after {len(losses)} steps: {cause}"


def _values(rows: Rows, name: str) -> list[float]:
    """Return the finite values of the rows that have one."""
    return [value for row in rows if (value := row.get(name)) is not None and value == value]


def _now(rows: Rows, name: str) -> float | None:
    """Return the mean of the RECENT newest values; None with fewer."""
    values = _values(rows[-RECENT:], name)
    return fmean(values) if len(values) == RECENT else None


def _before(rows: Rows, name: str) -> float | None:
    """Return the mean of the oldest RECENT values, which are others than those of _now."""
    values = _values(rows[:RECENT], name)
    return fmean(values) if len(rows) >= 2 * RECENT and len(values) == RECENT else None


def _median(rows: Rows, name: str) -> float:
    """Return the median of RECENT rows; 0 with fewer, which is no symptom."""
    values = _values(rows[-RECENT:], name)
    return median(values) if len(values) == RECENT else 0.0
