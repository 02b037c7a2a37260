"""Losses over the loss tokens of a microbatch; sums divided by a denominator that the caller fixed for the update.

All inputs are float32 [N], aligned. Because the denominator is global, microbatches, accumulation and data
parallelism add up to the same gradient.
"""

import numpy as np
import torch
from torch import Tensor

Metrics = dict[str, float]  # sums over tokens; the caller divides by the update's token count


def total(values: Tensor) -> float:
    """The sum in float64 in one fixed order, whatever the number of threads."""
    return float(values.detach().to(torch.float64).numpy().sum(dtype=np.float64))


def ppo_clip(
    policy_logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, *, denominator: float,
    clip_low: float, clip_high: float, weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = policy / behaviour (PPO, arXiv 1707.06347, eq. 7).

    Asymmetric bounds are DAPO's clip-higher (arXiv 2503.14476, eq. 10). weights multiply each token's term (an
    off-policy correction). No value loss and no entropy bonus.
    """
    log_ratio = policy_logprobs - behaviour_logprobs
    ratio = log_ratio.exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    terms = torch.minimum(plain, clipped)
    if weights is not None:
        terms = terms * weights
    return -terms.sum() / denominator, {
        "policy_loss": -total(terms),
        "ratio": total(ratio),
        "clip_share": total((clipped < plain).float()),
        "approx_kl": total((-log_ratio).expm1() + log_ratio),
    }


def truncated_importance(proximal_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """min(proximal / engine, cap), no gradient: corrects a rollout engine that is not exact (TIS, Yao et al. 2025).

    With P1 it is 1 everywhere.
    """
    return (proximal_logprobs - engine_logprobs).exp().clamp(max=cap).detach()


def negative_log_likelihood(policy_logprobs: Tensor, *, denominator: float) -> tuple[Tensor, Metrics]:
    """Supervised fine-tuning: the token mean of -log p."""
    return -policy_logprobs.sum() / denominator, {"nll": total(-policy_logprobs)}
