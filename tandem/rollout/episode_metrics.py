"""What the episodes of a step or of an evaluation were like, in numbers by name."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tandem.rl.filters import has_signal
from tandem.types import Array, Episode, Group, Row

TRUNCATED = ("length", "tokens")  # stop reasons of episodes that did not come to their end


def valid_rewards(groups: Sequence[Group]) -> Array:
    """float64 [N]: of the episodes that are not masked."""
    return np.concatenate([np.zeros(0), *(group.rewards[group.valid] for group in groups)])


def carries_signal(group: Group) -> bool:
    """Whether some advantage of it can be other than 0: its rewards differ, or a turn of it is
    penalized."""
    return has_signal(group.rewards) or any(episode.penalties.any() for episode in group.episodes)


def episode_metrics(groups: Sequence[Group]) -> Row:
    """What the episodes that the step sampled were like, those that dynamic sampling leaves out
    included."""
    if not groups:
        return {}
    episodes = [e for g in groups for e in g.episodes]
    rewards, scored = valid_rewards(groups), [e for e in episodes if not e.env_error]
    parts = sorted({name for e in scored for name in e.reward_parts})
    outcomes = [g.outcome for g in groups]
    return {
        "reward": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        **{
            f"reward_part/{n}": float(np.mean([e.reward_parts.get(n, 0.0) for e in scored]))
            for n in parts
        },
        "groups_without_signal": float(np.mean([not carries_signal(g) for g in groups])),
        **{
            f"groups/{kind}": float(outcomes.count(kind))
            for kind in sorted(set(outcomes) - {"train"})
        },
        "completion_tokens": float(np.mean([e.loss_mask.sum() for e in episodes])),
        "truncated": float(np.mean([e.stop_reason in TRUNCATED for e in episodes])),
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
    names = {
        "turns": "turn_limit",
        "tokens": "token_limit",
        "error": "env_errors",
        "time": "env_timeouts",
    }
    return row | {name: float(stopped[reason]) for reason, name in names.items() if stopped[reason]}


def sampled_tokens(groups: Sequence[Group]) -> int:
    return sum(int(e.loss_mask.sum()) for g in groups for e in g.episodes)
