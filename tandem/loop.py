"""One synchronous RL step on one page. READ THIS FIRST: `train_step`.

    problems -> episodes -> rewards -> journal -> advantages -> updates -> publish
    data        envs       rewards    stream     rl            train      weights
                engine

`drive` repeats it, with metrics, evaluation and checkpoints between the steps. A step is a pure function of the config,
the seed, the data, the weights and the `Progress` of the steps before: killed anywhere and run again, the same bits
come out.

    tandem train recipes/demo.toml
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tandem.config import Config, Reward
from tandem.data.mixture import problems_of_step
from tandem.draws import address, uniforms
from tandem.envs.rollout import World, run_episodes
from tandem.errors import UserError
from tandem.model.logprobs import Filter
from tandem.rl.advantages import running_mean
from tandem.rl.filters import has_signal, learnability, overlong_penalty, pick
from tandem.stream.journal import write_episodes
from tandem.train.distill import distill
from tandem.train.learn import Models, learn
from tandem.types import Array, Attempt, Episode, Generate, Group, Problem, Renderer, Row, SamplingParams, Score
from tandem.types import Reward as Scorer
from tandem.weights.inline import InlineSync


@dataclass(kw_only=True)
class Progress:
    """What a step leaves to the next besides weights. All but `carried` is in the checkpoint; those are in the journal."""

    batches: int = 0  # batches of problems drawn: the data cursor
    baseline: float | None = None  # running mean of rewards, for rl.advantage "ema"
    rates: dict[str, float] = field(default_factory=dict)  # uid -> its last success rate, for rl.curriculum
    carried: list[Group] = field(default_factory=list)  # survivors of dynamic sampling that no step had room for


Grade = Callable[[Sequence[Problem], Sequence[tuple[Episode, ...]]], list[tuple[Episode, ...]]]


@dataclass(frozen=True, kw_only=True)
class Player:
    """What plays episodes and has them scored: training, evaluation and `tandem rollout` share it."""

    engine: Generate
    renderer: Renderer
    world: World
    reward: Scorer
    grade: Grade | None = None  # a reward model: writes its word into the episodes' `given`, before they are scored


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What a step needs, built once by jobs.training_job."""

    config: Config
    problems: Sequence[Problem]
    player: Player
    models: Models
    sync: InlineSync
    params: SamplingParams  # of training rollouts
    episodes: Path  # the journal's folder
    exact: bool  # the engine has been found to keep P1 here, so the policy is held to it
    progress: Progress = field(default_factory=Progress)


def train_step(stages: Stages, step: int) -> tuple[Row, Row]:
    """Step `step`, counted from 0. Returns its metrics, which are a pure function of the run, and its timings."""
    config, progress, clock = stages.config, stages.progress, Clock()
    carried = len(progress.carried)
    sampled = collect(stages, step, clock)
    with clock("journal_s"):
        write_episodes(stages.episodes, step + 1, sampled)  # durable before anything is trained on it
    with clock("learn_s"):
        groups = [group for group in sampled if group.outcome == "train"]
        rewards = valid_rewards(groups)
        metrics = learn(
            stages.models, groups, config, Filter.of(stages.params), version=stages.player.engine.weight_version,
            baseline=float(rewards.mean()) if progress.baseline is None and len(rewards) else progress.baseline or 0.0,
            exact=stages.exact, train_policy=stages.models.critic is None or step >= config.critic.warmup_steps,
        )  # fmt: skip
    with clock("sync_s"):
        stages.sync.publish(step + 1)
    fresh = sampled[carried:]  # those that an earlier step carried here were described there
    advance(progress, sampled, fresh, config)
    flow = (
        {"batches": float(progress.batches), "groups/carried_in": float(carried)} if config.rl.max_gen_batches else {}
    )
    return {**describe(fresh), **metrics, **flow}, clock.timings(tokens=_sampled_tokens(fresh))


def distill_step(stages: Stages, step: int) -> tuple[Row, Row]:
    """The same with a teacher in place of the reward, which is only reported."""
    config, clock = stages.config, Clock()
    teacher = stages.models.teacher
    assert teacher is not None, "jobs.distill_job gives one"
    sampled = draw(stages, clock)
    with clock("journal_s"):
        write_episodes(stages.episodes, step + 1, sampled)
    with clock("learn_s"):
        metrics = distill(
            stages.models.policy, teacher, sampled, config, Filter.of(stages.params), version=stages.player.engine.weight_version,
            exact=stages.exact,
        )  # fmt: skip
    with clock("sync_s"):
        stages.sync.publish(step + 1)
    advance(stages.progress, sampled, sampled, config)
    return {**describe(sampled), **metrics}, clock.timings(tokens=_sampled_tokens(sampled))


def collect(stages: Stages, step: int, clock: "Clock") -> list[Group]:
    """The step's groups, scored. With dynamic sampling those without signal stand beside the ones to train, batches are
    drawn until the step is full, and survivors beyond that are carried to the next one."""
    rl, progress = stages.config.rl, stages.progress
    if not rl.max_gen_batches:
        return draw(stages, clock)
    groups = [replace(group, outcome="train") for group in progress.carried]
    drawn = 0
    while sum(group.outcome == "train" for group in groups) < rl.prompts_per_step:
        if drawn == rl.max_gen_batches:
            raise UserError(
                "dynamic sampling could not fill a step", where=f"step {step + 1}, after {drawn} batches (rl.max_gen_batches)",
                found=f"{sum(group.outcome == 'train' for group in groups)} groups whose rewards differ",
                expected=f"{rl.prompts_per_step} (rl.prompts_per_step)",
                next="raise rl.max_gen_batches, lower rl.prompts_per_step, or take problems that are neither solved nor hopeless",
            )  # fmt: skip
        fresh = draw(stages, clock)
        groups += [g if carries_signal(g) else replace(g, outcome="no_signal") for g in fresh]
        drawn += 1
    full = np.cumsum([group.outcome == "train" for group in groups]) > rl.prompts_per_step
    return [
        replace(group, outcome="carry") if late and group.outcome == "train" else group
        for group, late in zip(groups, full, strict=True)
    ]


def draw(stages: Stages, clock: "Clock") -> list[Group]:
    """The next batch of problems, sampled and scored."""
    config, progress = stages.config, stages.progress
    count, seed = config.rl.prompts_per_step, config.run.seed
    if config.rl.curriculum:
        rates = np.array([progress.rates.get(problem.uid, 0.5) for problem in stages.problems])
        key = np.full(len(rates), address(seed, "curriculum", progress.batches), np.uint64)
        chances = 1.0 - uniforms(key, np.arange(len(rates))).astype(np.float64)
        problems = [stages.problems[i] for i in pick(learnability(rates), chances, count)]
    else:
        problems = problems_of_step(stages.problems, progress.batches, count, seed, config.data.shuffle)
    groups = play(
        stages.player, problems, group_size=config.rl.group_size, place=(seed, "rollout", progress.batches),
        params=stages.params, shaping=config.reward, clock=clock,
    )  # fmt: skip
    progress.batches += 1
    return groups


def advance(progress: Progress, sampled: Sequence[Group], fresh: Sequence[Group], config: Config) -> None:
    """What the next step is to know of this one; rewards that are not finite are no statistics."""
    progress.carried = [group for group in sampled if group.outcome == "carry"]
    rewards = valid_rewards([group for group in sampled if group.outcome == "train"])
    if config.rl.advantage == "ema" and len(rewards) and np.isfinite(rewards).all():
        progress.baseline = running_mean(progress.baseline, rewards, config.rl.ema_decay)
    if config.rl.curriculum:
        means = {group.problem.uid: float(group.rewards.mean()) for group in fresh if group.valid.any()}
        progress.rates |= {uid: min(max(mean, 0.0), 1.0) for uid, mean in means.items() if np.isfinite(mean)}


def valid_rewards(groups: Sequence[Group]) -> Array:
    """float64 [N]: of the episodes that are not masked."""
    return np.concatenate([np.zeros(0), *(group.rewards[group.valid] for group in groups)])


def carries_signal(group: Group) -> bool:
    """Whether some advantage of it can be other than 0: its rewards differ, or a turn of it is penalized."""
    return has_signal(group.rewards) or any(episode.penalties.any() for episode in group.episodes)


def play(
    player: Player, problems: Sequence[Problem], *, group_size: int, place: tuple[int | str, ...], params: SamplingParams,
    shaping: Reward, clock: "Clock",
) -> list[Group]:  # fmt: skip
    """G scored episodes of each problem. An episode is scored while the others are still generated; one whose scoring
    fails costs its reward only, and says so."""
    verdicts: dict[tuple[int, int], Future[Score]] = {}

    def submit(row: int, episode: Episode) -> None:
        verdicts[row, episode.sample_index] = player.reward.submit(problems[row], attempt_of(episode))

    with clock("rollout_s"):
        attempts = run_episodes(
            problems, group_size=group_size, place=place, engine=player.engine, renderer=player.renderer, world=player.world,
            params=params, ended=None if player.grade else submit,
        )  # fmt: skip
    _refuse_if_all_failed(
        [e.env_error for group in attempts for e in group], "failed in its environment",
        where=f"env.name = {player.world.limits.name}",
    )  # fmt: skip
    with clock("reward_s"):
        if player.grade:
            attempts = player.grade(problems, attempts)
            for row, episodes in enumerate(attempts):
                for episode in episodes:
                    submit(row, episode)
        groups = [
            Group(
                problem=problem,
                episodes=tuple(
                    scored(e, verdicts[row, e.sample_index].result(), shaping, params.max_new_tokens) for e in episodes
                ),
            )
            for row, (problem, episodes) in enumerate(zip(problems, attempts, strict=True))
        ]
    _refuse_if_all_failed(
        [e.reward_error for g in groups for e in g.episodes], "could not be scored", where="reward.function"
    )
    return groups


def _refuse_if_all_failed(errors: Sequence[str], what: str, where: str) -> None:
    """One failure costs an episode; where nothing works, going on would cost the run."""
    if len(errors) > 1 and all(errors):
        raise UserError(f"every episode {what}", where=where, found=errors[0], expected="some that work",
                        next="mend it (`tandem try` runs it alone); the same command resumes")  # fmt: skip


def attempt_of(episode: Episode) -> Attempt:
    return Attempt(
        text=episode.text, messages=episode.messages, opening=episode.opening, stop_reason=episode.stop_reason,
        given=episode.given,
    )  # fmt: skip


def scored(episode: Episode, verdict: Score, shaping: Reward, max_tokens: int) -> Episode:
    """The episode with its reward; one that failed in its environment has reward 0, whatever its text is worth."""
    if episode.env_error:
        return replace(episode, reward=0.0)
    value, parts = verdict.reward, dict(verdict.parts)
    cut = episode.stop_reason == "length"
    length = max_tokens if cut else _last_turn(episode)
    if cost := shaping.overlong_penalty * (cut or overlong_penalty(length, max_tokens, shaping.overlong_buffer)):
        value, parts["overlong"] = value - cost, -cost
    return replace(episode, reward=value, reward_parts=parts, reward_error=verdict.error)


def _last_turn(episode: Episode) -> int:
    """Tokens sampled in it."""
    return int(np.argmin(np.append(episode.loss_mask[::-1], False)))


def describe(groups: Sequence[Group]) -> Row:
    """What the episodes that the step sampled were like, those that dynamic sampling leaves out included."""
    if not groups:
        return {}
    episodes = [e for g in groups for e in g.episodes]
    rewards, scored = valid_rewards(groups), [e for e in episodes if not e.env_error]
    parts = sorted({name for e in scored for name in e.reward_parts})
    outcomes = [g.outcome for g in groups]
    return {
        "reward": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        **{f"reward_part/{n}": float(np.mean([e.reward_parts.get(n, 0.0) for e in scored])) for n in parts},
        "groups_without_signal": float(np.mean([not carries_signal(g) for g in groups])),
        **{f"groups/{kind}": float(outcomes.count(kind)) for kind in sorted(set(outcomes) - {"train"})},
        "completion_tokens": float(np.mean([e.loss_mask.sum() for e in episodes])),
        "truncated": float(np.mean([e.stop_reason in ("length", "tokens") for e in episodes])),
        "reward_errors": float(sum(bool(e.reward_error) for e in episodes)),
        **played(episodes),
    }


def played(episodes: Sequence[Episode]) -> Row:
    """How the episodes went in their environment; nothing for single turns that went well."""
    row: Row = {}
    if any(e.num_turns > 1 for e in episodes):
        row["turns"] = float(np.mean([e.num_turns for e in episodes]))
    if any(e.penalties.any() for e in episodes):
        row["penalized"] = float(np.mean([e.penalties.any() for e in episodes]))
    stopped = Counter(e.stop_reason for e in episodes)
    names = {"turns": "turn_limit", "tokens": "token_limit", "error": "env_errors", "time": "env_timeouts"}
    return row | {name: float(stopped[reason]) for reason, name in names.items() if stopped[reason]}


def _sampled_tokens(groups: Sequence[Group]) -> int:
    return sum(int(e.loss_mask.sum()) for g in groups for e in g.episodes)


class Clock:
    """Wall seconds of the parts of a step; they go to timings.jsonl and never into a decision."""

    def __init__(self) -> None:
        self.parts: Row = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start

    def timings(self, *, tokens: int) -> Row:
        seconds = sum(self.parts.values())
        return {
            **self.parts,
            "step_s": seconds,
            "generated_tokens_per_s": tokens / max(self.parts.get("rollout_s", 0.0), 1e-9),
        }
