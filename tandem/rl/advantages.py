"""Advantages of episodes from the rewards of a step, one function an idea. Rewards float64 [P, G],
one row a problem.

Every token of an episode has the same advantage here; returns.py looks at single tokens.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from tandem.types import Group


def grpo(rewards: np.ndarray, epsilon: float = 1e-6) -> np.ndarray:
    """Compute (r - mean) / (std + epsilon) in each group (GRPO, arXiv 2402.03300, section 4.1.2;
    std with G in the denominator)."""
    gains = centred(rewards)
    return gains / (gains.std(1, keepdims=True) + epsilon)


def centred(rewards: np.ndarray) -> np.ndarray:
    """Compute r - mean in each group (Dr.GRPO, arXiv 2503.20783, section 3.2: dividing by std
    favours problems nearly solved).

    Its expectation is (G - 1) / G of the policy gradient: the baseline holds the episode itself.
    Exactly 0 if all rewards of a group are equal.
    """
    shifted = rewards - rewards[:, :1]
    return shifted - shifted.mean(1, keepdims=True)


def rloo(rewards: np.ndarray) -> np.ndarray:
    """Compute r minus the mean of the *other* episodes (RLOO, arXiv 2402.14740, eq. 7), G >= 2;
    unbiased. It is G / (G - 1) times `centred`."""
    size = rewards.shape[1]
    return centred(rewards) * (size / (size - 1))


def rloo_std(rewards: np.ndarray, epsilon: float = 1e-6) -> np.ndarray:
    """Divide `rloo` by the std of the group: G / (G - 1) times `grpo`."""
    return rloo(rewards) / (centred(rewards).std(1, keepdims=True) + epsilon)


def gdpo(parts: np.ndarray, weights: np.ndarray, epsilon: float = 1e-6) -> np.ndarray:
    """Sum `grpo` of each reward by itself, weighted, then shift and scale by mean and std over the
    step (GDPO, arXiv 2601.05242, section 3.1). parts float64 [K, P, G], NaN where a reward does
    not apply to an episode, which is then not compared by it; weights [K].

    Normalized together, episodes that earn different rewards of the same sum would have one
    advantage.
    """
    first = np.take_along_axis(parts, np.isnan(parts).argmin(2, keepdims=True), 2)
    shifted = np.ma.masked_invalid(parts - first)
    centred = shifted - shifted.mean(2, keepdims=True)
    of_each = (centred / (centred.std(2, keepdims=True) + epsilon)).filled(0.0)
    gains = np.tensordot(weights, of_each, axes=1)
    return (gains - gains.mean()) / (gains.std() + epsilon)


def max_at_k(rewards: np.ndarray, k: int) -> np.ndarray:
    """Compute the gradient weights of E[max reward of k episodes], which is pass@k for rewards 0
    and 1 (PKPO, arXiv 2505.15201).

    k times the mean, over all sets J of k - 1 other episodes, of max(r, max J) - max J: unbiased,
    with max J as the baseline. Needs 2 <= k <= G. Sets are not enumerated: of G - 1 sorted episodes
    the one of rank j (from 0) is the largest of C(j, k - 2).
    """
    groups, size = rewards.shape
    order = np.argsort(rewards, 1, kind="stable")
    ranked = np.take_along_axis(rewards, order, 1)
    largest = _chance_of_largest(size - 1, k - 1)
    gains = np.zeros((groups, size))
    for i in range(size):
        others = np.delete(ranked, i, 1)  # [P, G - 1], still sorted
        gains[:, i] = (np.maximum(ranked[:, i : i + 1], others) - others) @ largest
    result = np.empty((groups, size))
    np.put_along_axis(result, order, k * gains, 1)
    return result


def _chance_of_largest(count: int, size: int) -> np.ndarray:
    """Return float64 [count]: the share of all subsets of that size in which the item of each rank
    (from 0) is the largest."""
    share = np.zeros(count)
    share[-1] = size / count
    for rank in range(count - 2, size - 2, -1):  # C(rank, size - 1) / C(count, size), downwards
        share[rank] = share[rank + 1] * (rank + 2 - size) / (rank + 1)
    return share


def against(rewards: np.ndarray, baseline: float) -> np.ndarray:
    """Compute r - baseline, a number fixed before the step, e.g. a running mean of earlier rewards
    (REINFORCE, Williams 1992)."""
    return rewards - baseline


def running_mean(before: float | None, rewards: np.ndarray, decay: float) -> float:
    """Update the exponential moving average of the mean reward; the first step's mean starts it."""
    mean = float(rewards.mean())
    return mean if before is None else decay * before + (1 - decay) * mean


def penalize(
    advantages: np.ndarray, penalties: np.ndarray, mode: Literal["lower", "set"]
) -> np.ndarray:
    """Lower the advantages [N] of penalized turns (penalty > 0) by their penalty, or set them to
    -penalty."""
    match mode:
        case "lower":
            return advantages - penalties
        case "set":
            return np.where(penalties > 0, -penalties, advantages)


def sampled_lengths(groups: Sequence[Group]) -> np.ndarray:
    """Count the sampled tokens of the episodes of groups of one size, int64 [P, G]."""
    return np.array([[int(e.loss_mask.sum()) for e in group.episodes] for group in groups])
