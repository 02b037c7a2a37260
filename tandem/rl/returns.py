"""Advantages of single tokens: discounted returns and GAE. Arrays float64 [N], one entry a
*sampled* token of an episode.

Tokens of the prompt, of tools and of the environment are not in the arrays, so an episode of
several turns is one sequence of decisions: the step after the last token of a turn is the first of
the next.
"""

from collections.abc import Sequence

import numpy as np


def token_rewards(reward: float, kl: np.ndarray, kl_coef: float) -> np.ndarray:
    """Spread a reward over tokens: -kl_coef x KL at each, and the episode's reward at the last
    (Ziegler et al. 2019, eq. 2)."""
    rewards = -kl_coef * kl.astype(np.float64)
    rewards[-1] += reward
    return rewards


def returns_to_go(rewards: np.ndarray, gamma: float) -> np.ndarray:
    """Compute G_t = r_t + gamma G_{t+1}; with `whiten` over a step's tokens this is REINFORCE++
    (arXiv 2501.03262, eq. 5).

    `whiten` of `advantages.centred`, the same at every token of an episode, is REINFORCE++-baseline
    (section 3.2).
    """
    result = np.empty(len(rewards))
    ahead = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        ahead = result[t] = rewards[t] + gamma * ahead
    return result


def gae(
    rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Compute (advantages, returns): A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma
    V_{t+1} - V_t (arXiv 1506.02438, eq. 16).

    values[t]: of the state before token t; after the last token it is 0, as every episode ends.
    The returns, which the critic learns, are A + V.
    """
    after = np.append(values[1:], 0.0)
    deltas = rewards + gamma * after - values
    advantages = returns_to_go(deltas, gamma * lam)
    return advantages, advantages + values


def whiten(arrays: Sequence[np.ndarray], epsilon: float = 1e-8) -> list[np.ndarray]:
    """Shift and scale every array by the mean and std of all tokens of the step together."""
    together = np.concatenate(arrays)
    mean, std = together.mean(), together.std()
    return [(array - mean) / (std + epsilon) for array in arrays]
