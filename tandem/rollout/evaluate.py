"""Held-out evaluation: greedy and sampled, by category, with an interval. Draws are the same at
every step.

It knows problems and a player; nothing of training.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import comb

import numpy as np

from tandem.config.schema import Eval, Rollout
from tandem.config.schema import Reward as RewardConfig
from tandem.rollout.episode_builder import new_groups
from tandem.rollout.episode_metrics import played
from tandem.rollout.score import RolloutRunner, Timer, generate_and_score
from tandem.types import Group, Problem, Row, SamplingParams

NO_PENALTY = RewardConfig()  # shaping is for training


def evaluate(
    player: RolloutRunner,
    problems: Sequence[Problem],
    *,
    seed: int,
    how: Eval,
    rollout: Rollout,
    stop_token_ids: tuple[int, ...],
    known: Mapping[str, list[Group]] = {},
    ended: Callable[[str, list[Group]], None] = lambda name, groups: None,
) -> tuple[Row, dict[str, list[Group]]]:
    """(metrics, every episode by the pass it is of: "sampled", "greedy"); known: passes that need
    not be made again; ended: told of each pass that is made.

    Sampled rewards come with a 95% interval over problems, by category, and with pass@k.
    """
    sampled = sampling_params(rollout, stop_token_ids)
    greedy = SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=0.0,
        stop=sampled.stop,
        stop_token_ids=stop_token_ids,
    )
    passes = [("sampled", sampled, how.samples)] + ([("greedy", greedy, 1)] if how.greedy else [])
    metrics: Row = {}
    groups: dict[str, list[Group]] = {}
    for name, params, count in passes:
        if name in known:
            groups[name] = known[name]
        else:
            seated = new_groups(problems, count, (seed, "eval", name))
            groups[name] = generate_and_score(
                player, seated, params=params, shaping=NO_PENALTY, clock=Timer()
            )
            ended(name, groups[name])
        metrics |= _summary(name, groups[name])
    return metrics | _pass_rates(groups["sampled"], how.success), groups


def _pass_rates(groups: Sequence[Group], success: float) -> Row:
    """eval/pass@k for k = 1, 2, 4, ... up to the samples: the chance that one of k passes, without
    bias (arXiv 2107.03374)."""
    size = len(groups[0].episodes)
    passed = [
        sum(e.reward >= success and not e.env_error for e in group.episodes) for group in groups
    ]
    return {
        f"eval/pass@{k}": float(np.mean([1.0 - comb(size - n, k) / comb(size, k) for n in passed]))
        for k in (2**i for i in range(size.bit_length()))
    }


def sampling_params(rollout: Rollout, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        stop=tuple(rollout.stop),
        stop_token_ids=stop_token_ids,
    )


def _summary(name: str, groups: Sequence[Group]) -> Row:
    means = np.array([g.rewards.mean() for g in groups])
    half = 1.96 * float(means.std(ddof=1)) / np.sqrt(len(means)) if len(means) > 1 else 0.0
    by_category: dict[str, list[float]] = defaultdict(list)
    for group, mean in zip(groups, means, strict=True):
        by_category[group.problem.category].append(float(mean))
    row = {f"eval/{name}": float(means.mean()), f"eval/{name}_interval": float(half)}
    if len(by_category) > 1:
        row |= {
            f"eval/{name}/{category}": float(np.mean(values))
            for category, values in sorted(by_category.items())
        }
    episodes = [e for g in groups for e in g.episodes]
    truncated = [e.stop_reason in ("length", "tokens") for e in episodes]
    failed = {
        f"eval/{name}_{what}": value
        for what, value in played(episodes).items()
        if what.startswith("env_")
    }
    return row | failed | {f"eval/{name}_truncated": float(np.mean(truncated))}
