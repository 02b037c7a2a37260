"""Metrics of the episodes of a step or an evaluation."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tandem.rl.filters import has_signal
from tandem.types import Array, Episode, EpisodeStop, Group, Row

TRUNCATED = ("length", "tokens")  # stop reasons of episodes that did not come to their end

ENV_STOPS: dict[EpisodeStop, str] = {  # stop reason -> metric
    "turns": "turn_limit",
    "tokens": "token_limit",
    "error": "env_errors",
    "time": "env_timeouts",
}


def valid_rewards(groups: Sequence[Group]) -> Array:
    """Return the rewards of the episodes that are not masked, float64 [N]."""
    return np.concatenate([np.zeros(0), *(group.rewards[group.valid] for group in groups)])


def carries_signal(group: Group) -> bool:
    """Tell whether an advantage can be other than 0: rewards differ, or a turn is penalized."""
    return has_signal(group.rewards) or any(episode.penalties.any() for episode in group.episodes)


def episode_metrics(groups: Sequence[Group]) -> Row:
    """Return the metrics of a step's episodes, including those left out by dynamic sampling."""
    if not groups:
        return {}
    episodes = [e for g in groups for e in g.episodes]
    rewards, scored = valid_rewards(groups), [e for e in episodes if not e.env_error]
    parts = sorted({name for e in scored for name in e.reward_parts})
    outcomes = Counter(group.outcome for group in groups)
    return {
        "reward": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        **{
            f"reward_part/{n}": float(np.mean([e.reward_parts.get(n, 0.0) for e in scored]))
            for n in parts
        },
        "groups_without_signal": float(np.mean([not carries_signal(g) for g in groups])),
        **{f"groups/{n}": float(outcomes[n]) for n in sorted(outcomes) if n != "train"},
        "completion_tokens": float(np.mean([e.loss_mask.sum() for e in episodes])),
        "truncated": float(np.mean([e.stop_reason in TRUNCATED for e in episodes])),
        "reward_errors": float(sum(bool(e.reward_error) for e in episodes)),
        **env_metrics(episodes),
    }


def staleness_metrics(groups: Sequence[Group], version: int) -> Row:
    """Return how many versions the tokens of the groups that a step trains on are behind `version`,
    the weights that it updates: their mean and the largest."""
    valid = (e for g in groups for e, keep in zip(g.episodes, g.valid, strict=True) if keep)
    versions = [e.weight_versions[e.loss_mask] for e in valid]
    behind = version - np.concatenate([np.zeros(0, np.int64), *versions])
    if not len(behind):
        return {}
    return {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}


def env_metrics(episodes: Sequence[Episode]) -> Row:
    """Return metrics of episodes in their environment; none for single turns that went well."""
    row: Row = {}
    if any(e.num_turns > 1 for e in episodes):
        row["turns"] = float(np.mean([e.num_turns for e in episodes]))
    if any(e.penalties.any() for e in episodes):
        row["penalized"] = float(np.mean([e.penalties.any() for e in episodes]))
    stops = Counter(e.stop_reason for e in episodes)
    return row | {name: float(stops[stop]) for stop, name in ENV_STOPS.items() if stops[stop]}
