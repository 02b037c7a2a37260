"""Filters and weights of groups and problems to train on: groups with signal, completions that
ended, problems neither solved nor hopeless."""

import numpy as np


def has_signal(rewards: np.ndarray) -> bool:
    """Tell whether the rewards [G] of a group differ (dynamic sampling, arXiv 2503.14476, eq. 11);
    if all are equal, every group-relative advantage is 0.

    The rewards are those trained on, length penalty included; the paper's are right or wrong.
    """
    return bool((rewards != rewards[0]).any())


def overlong_penalty(length: int, max_tokens: int, buffer: int) -> float:
    """Return how far a completion reaches into the last `buffer` tokens before its limit, 0 to 1
    (DAPO, arXiv 2503.14476, eq. 13); 0 without a buffer."""
    return float(np.clip((length - (max_tokens - buffer)) / buffer, 0.0, 1.0)) if buffer else 0.0


def learnability(rates: np.ndarray) -> np.ndarray:
    """Compute p (1 - p) of success rates [M], the variance of the reward (sampling for
    learnability, arXiv 2502.12272). A small floor lets solved and hopeless problems come back now
    and then."""
    return rates * (1 - rates) + 0.01


def pick(weights: np.ndarray, uniforms: np.ndarray, count: int) -> np.ndarray:
    """Draw `count` places without replacement by weight, int64 [count], from one uniform in (0, 1]
    each (Efraimidis, Spirakis 2006)."""
    keys = np.log(uniforms) / weights
    return np.argsort(-keys, kind="stable")[:count]
