"""How the rewards of a group become advantages. Rewards float32 [P, G], one row a problem; the same shape comes back."""

from typing import Literal

import numpy as np

Advantage = Literal["grpo", "grpo_no_std", "dr_grpo", "rloo"]


def grpo(rewards: np.ndarray, epsilon: float = 1e-6) -> np.ndarray:
    """(r - mean) / (std + epsilon) in each group (GRPO, arXiv 2402.03300, eq. 3; std with G in the denominator)."""
    centred = rewards - rewards.mean(1, keepdims=True)
    return centred / (rewards.std(1, keepdims=True) + epsilon)


def centred(rewards: np.ndarray) -> np.ndarray:
    """r - mean in each group (Dr.GRPO, arXiv 2503.20783: dividing by std favours problems that are nearly solved)."""
    return rewards - rewards.mean(1, keepdims=True)


def rloo(rewards: np.ndarray) -> np.ndarray:
    """r minus the mean of the *other* episodes (RLOO, arXiv 2402.14740, eq. 8) = G / (G - 1) times `centred`."""
    others = (rewards.sum(1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
    return rewards - others


def advantages(kind: Advantage, rewards: np.ndarray) -> np.ndarray:
    """float32 [P, G] -> float32 [P, G], computed in float64."""
    exact = rewards.astype(np.float64)
    match kind:
        case "grpo":
            result = grpo(exact)
        case "grpo_no_std" | "dr_grpo":
            result = centred(exact)
        case "rloo":
            result = rloo(exact)
    return result.astype(np.float32)


def loss_denominator(kind: Advantage, *, num_loss_tokens: int, num_episodes: int, max_new_tokens: int) -> float:
    """What the token sum of a whole update is divided by.

    The tokens themselves (token mean), or for Dr.GRPO the constant length that makes a token of a long episode
    weigh as much as one of a short (arXiv 2503.20783, section 3.2).
    """
    return float(num_episodes * max_new_tokens) if kind == "dr_grpo" else float(max(num_loss_tokens, 1))
