"""One synchronous GRPO step on one page. READ THIS FIRST: `train_step`.

    problems -> episodes -> rewards -> journal -> samples -> update -> publish
    data        envs       rewards    stream     rl         train     weights
                engine

`train` repeats it, with metrics, evaluation and checkpoints between the steps. A step is a pure function of the config,
the seed, the data and the weights: killed anywhere and run again, the same bits come out.

    tandem train recipes/demo.toml
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tandem.config import Config
from tandem.data.problems import problems_of_step
from tandem.envs.rollout import run_episodes
from tandem.model.logprobs import Filter
from tandem.rl.advantages import advantages, loss_denominator
from tandem.stream.journal import write_episodes
from tandem.train.pack import pack
from tandem.train.policy import Policy
from tandem.types import Env, Episode, Generate, Group, Problem, Renderer, Reward, Row, Sample, SamplingParams
from tandem.weights.inline import InlineSync


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What a step needs, built once by build.build_stages."""

    config: Config
    problems: Sequence[Problem]
    renderer: Renderer
    env: Env
    engine: Generate
    reward: Reward
    policy: Policy
    sync: InlineSync
    params: SamplingParams  # of training rollouts
    episodes: Path  # the journal's folder


def train_step(stages: Stages, step: int) -> tuple[Row, Row]:
    """Step `step`, counted from 0. Returns its metrics, which are a pure function of the run, and its timings."""
    config, clock = stages.config, Clock()
    size = config.rl.group_size
    with clock("rollout_s"):
        problems = problems_of_step(
            stages.problems, step, config.rl.prompts_per_step, config.run.seed, config.data.shuffle
        )
        attempts = run_episodes(
            problems, group_size=size, place=(config.run.seed, "rollout", step), engine=stages.engine,
            renderer=stages.renderer, env=stages.env, params=stages.params,
        )  # fmt: skip
    with clock("reward_s"):
        groups = score(problems, attempts, stages.reward, config.reward.overlong_penalty)
    with clock("journal_s"):
        write_episodes(stages.episodes, step + 1, groups)  # durable before anything is trained on it
    with clock("learn_s"):
        metrics = learn(stages, groups)
    with clock("sync_s"):
        stages.sync.publish(step + 1)
    return {**describe(groups), **metrics}, clock.timings(
        tokens=sum(int(e.loss_mask.sum()) for g in groups for e in g.episodes)
    )


def score(
    problems: Sequence[Problem], attempts: Sequence[Sequence[Episode]], reward: Reward, overlong_penalty: float
) -> list[Group]:
    """Every episode with its reward; a scoring failure costs that episode's reward and is written on it."""
    pairs = [(problem, episode) for problem, episodes in zip(problems, attempts, strict=True) for episode in episodes]
    scores = iter(reward.score_all([(problem, episode.text) for problem, episode in pairs]))

    def scored(episode: Episode) -> Episode:
        verdict = next(scores)
        value, parts = verdict.reward, dict(verdict.parts)
        if overlong_penalty and episode.stop_reason == "length":
            value, parts["overlong"] = value - overlong_penalty, -overlong_penalty
        return replace(episode, reward=value, reward_parts=parts, reward_error=verdict.error)

    return [
        Group(problem=problem, episodes=tuple(scored(e) for e in episodes))
        for problem, episodes in zip(problems, attempts, strict=True)
    ]


def to_samples(groups: Sequence[Group], config: Config) -> list[Sample]:
    """Episodes with their advantages, group by group."""
    rewards = np.array([[e.reward for e in g.episodes] for g in groups], np.float32)
    table = advantages(config.rl.advantage, rewards)
    return [
        Sample(
            tokens=e.tokens, loss_mask=e.loss_mask, engine_logprobs=e.engine_logprobs,
            advantages=np.where(e.loss_mask, table[row, column], np.float32(0)), prefix=e.num_prompt_tokens, group=row,
        )
        for row, group in enumerate(groups)
        for column, e in enumerate(group.episodes)
    ]  # fmt: skip


def learn(stages: Stages, groups: Sequence[Group]) -> Row:
    """`rl.minibatches` updates over the step's groups; the gap between engine and policy is the first update's."""
    config, policy = stages.config, stages.policy
    how = Filter.of(stages.params)
    samples = to_samples(groups, config)
    per_update = len(samples) // config.rl.minibatches
    updates = [samples[start : start + per_update] for start in range(0, len(samples), per_update)]
    packed = [pack(update, config.train.tokens_per_microbatch) for update in updates]
    proximal = [policy.proximal_logprobs(batches, how) if config.rl.importance_cap else None for batches in packed]
    rows = []
    for update, batches, before in zip(updates, packed, proximal, strict=True):
        denominator = loss_denominator(
            config.rl.advantage, num_loss_tokens=sum(len(b.targets) for b in batches),
            num_episodes=len(update), max_new_tokens=config.rollout.max_new_tokens,
        )  # fmt: skip
        rows.append(policy.learn(batches, config.rl, how, denominator, before))
    tokens = np.array([row["num_loss_tokens"] for row in rows])
    means = {name: float(np.average([row[name] for row in rows], weights=tokens)) for name in rows[0]}
    sums = {name: float(sum(row[name] for row in rows)) for name in ("num_loss_tokens", "skipped_updates")}
    return means | sums | {"logprob_gap": rows[0]["logprob_gap"]}


def describe(groups: Sequence[Group]) -> Row:
    """What the step's episodes were like."""
    episodes = [e for g in groups for e in g.episodes]
    rewards = np.array([[e.reward for e in g.episodes] for g in groups])
    parts = sorted({name for e in episodes for name in e.reward_parts})
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        **{f"reward_part/{n}": float(np.mean([e.reward_parts.get(n, 0.0) for e in episodes])) for n in parts},
        "groups_without_signal": float((rewards.std(1) == 0).mean()),
        "completion_tokens": float(np.mean([e.loss_mask.sum() for e in episodes])),
        "truncated": float(np.mean([e.stop_reason == "length" for e in episodes])),
        "reward_errors": float(sum(bool(e.reward_error) for e in episodes)),
    }


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
