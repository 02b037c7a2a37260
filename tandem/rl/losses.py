"""Policy and value losses of single tokens, one function an idea; their KL to a reference; and the
weights by which they add up to one number.

All inputs are float32 [N] and aligned, N loss tokens of whole sequences; `sequences` int64 [N]
tells which one a token is of. A function returns the tokens' losses [N] and metrics as sums over
tokens. `proximal_logprobs` are those of the policy at the start of the step: with P1 they are the
engine's own, and at the first update the ratio is exactly 1.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
Metrics = dict[str, float]  # sums over tokens; the caller divides by the update's token count


def total(values: Tensor) -> float:
    """Sum in float64 in one fixed order, with any number of threads."""
    return float(values.detach().to("cpu", torch.float64).numpy().sum(dtype=np.float64))


def sequence_sums(values: Tensor, sequences: Tensor) -> Tensor:
    """Sum over each sequence's tokens, [N] -> [S]; sequences ascend from 0 without a gap."""
    count = int(sequences[-1]) + 1 if len(sequences) else 0
    return values.new_zeros(count).index_add(0, sequences, values)


def sequence_means(values: Tensor, sequences: Tensor) -> Tensor:
    """Average over each sequence's tokens, [N] -> [S]."""
    return sequence_sums(values, sequences) / sequence_sums(torch.ones_like(values), sequences)


def reinforce(policy_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Metrics]:
    """Compute -A log p (REINFORCE, Williams 1992; RLOO, arXiv 2402.14740). On policy only: it has
    no ratio."""
    terms = -advantages * policy_logprobs
    return terms, {"policy_loss": total(terms)}


def ppo_clip(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """Compute -min(r A, clip(r, 1 - low, 1 + high) A), r = policy / proximal (PPO, arXiv
    1707.06347, eq. 7).

    Bounds that differ are DAPO's clip-higher (arXiv 2503.14476, eq. 10). dual_clip c > 1 bounds the
    loss where A < 0 by -c A, so that a large ratio cannot blow it up (arXiv 1912.09729, eq. 5).
    With c > 1 + high it is the two-sided clip of INTELLECT-2 (arXiv 2505.07291, section 3.4), TRL's
    `delta`.
    """
    log_ratio = _bounded(policy_logprobs - proximal_logprobs)
    objective, plain = _clipped(log_ratio, advantages, clip_low, clip_high)
    if dual_clip:
        objective = torch.where(
            advantages < 0, torch.maximum(objective, dual_clip * advantages), objective
        )
    return -objective, _ratio_metrics(-objective, log_ratio, objective != plain)


def gspo(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """Compute PPO's clip on the ratio of a sequence, the geometric *mean* of its tokens' ratios, in
    the form of GSPO-token (GSPO, arXiv 2507.18071, eq. 5-7 and 13-17).

    Every token of a sequence has that ratio as its value, and passes the gradient of its own
    log-prob only. If the tokens of a sequence have one advantage, sequence_mean gives the paper's
    sequence objective and its gradient; an advantage or weight of a single token pulls this token
    and no other. The sum in place of the mean would make a long sequence's ratio
    vanish (TRL #5814).
    """
    means = sequence_means((policy_logprobs - proximal_logprobs).detach(), sequences)
    log_ratio = _bounded(
        means.index_select(0, sequences) + (policy_logprobs - policy_logprobs.detach())
    )
    objective, plain = _clipped(log_ratio, advantages, clip_low, clip_high)
    return -objective, _ratio_metrics(-objective, log_ratio, objective != plain)


def off_policy_mask(
    policy_logprobs: Tensor,
    engine_logprobs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    most: float,
) -> Tensor:
    """Return float32 [N]: 0 for the tokens with A < 0 of sequences that the policy has left, else 1
    (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

    The policy has left a sequence if the mean over its tokens of log engine - log policy is above
    `most`.
    """
    gap = sequence_means((engine_logprobs - policy_logprobs).detach(), sequences).index_select(
        0, sequences
    )
    return ((advantages >= 0) | (gap <= most)).to(policy_logprobs.dtype)


def cispo(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """Compute -clip(r) A log p without a gradient through clip(r): no token loses its gradient
    (CISPO, arXiv 2506.13585, eq. 4-5)."""
    log_ratio = _bounded(policy_logprobs - proximal_logprobs).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = -weight * advantages * policy_logprobs
    return terms, _ratio_metrics(terms, log_ratio, weight != ratio)


def _bounded(log_ratio: Tensor) -> Tensor:
    """Bound to 20 nats: beyond them exp overflows float32, and infinity times an advantage of 0 is
    NaN."""
    return log_ratio.clamp(-20.0, 20.0)


def _clipped(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return (min(r A, clip(r) A), r A). Where they are equal the gradient is that of r A: with
    `minimum` it would be half of that at a bound, as clamp has a gradient of 0 there since torch
    2.15."""
    ratio = log_ratio.exp()
    plain, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return torch.where(plain <= clipped, plain, clipped), plain


def _ratio_metrics(terms: Tensor, log_ratio: Tensor, clipped: Tensor) -> Metrics:
    return {
        "policy_loss": total(terms),
        "ratio": total(log_ratio.exp()),
        "clip_share": total(clipped.float()),
        "approx_kl": total((-log_ratio).expm1() + log_ratio),
    }


def value_clip(
    values: Tensor, rollout_values: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, Metrics]:
    """Compute max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2, the value loss of PPO's
    code (arXiv 2005.12729, section 3); with clip 0, (V - R)^2 / 2."""
    error = (values - returns).square()
    if clip:
        near = rollout_values + (values - rollout_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return error / 2, {
        "value_loss": total(error) / 2,
        "value": total(values),
        "return": total(returns),
    }


def negative_log_likelihood(policy_logprobs: Tensor) -> tuple[Tensor, Metrics]:
    """Compute -log p, the loss of supervised fine-tuning."""
    return -policy_logprobs, {"nll": total(-policy_logprobs)}


def kl_estimate(
    kind: Literal["k1", "k2", "k3"], policy_logprobs: Tensor, reference_logprobs: Tensor
) -> Tensor:
    """Estimate KL(policy || reference) in nats at each token, float32 [N] -> [N]; exactly 0 if the
    two are equal (John Schulman, "Approximating KL divergence", 2020).

    With d = policy - reference, at tokens that the policy sampled:
    k1 = d                 unbiased. As a loss its gradient is zero in expectation; in the reward it
                           is the right one.
    k2 = d^2 / 2           biased. As a loss its gradient is that of each token's own KL.
    k3 = exp(-d) - 1 + d   unbiased, never negative. As a loss its gradient is that of
                           KL(reference || policy).

    d of k3 is bounded to 20 nats, as beyond them exp overflows float32; outside there is no
    gradient. k2 and k3 in the reward give a gradient that can point away from the reference
    (tests/rl/test_expectation.py).
    """
    d = policy_logprobs - reference_logprobs
    match kind:
        case "k1":
            return d
        case "k2":
            return d * d / 2
        case "k3":
            d = d.clamp(-20.0, 20.0)
            return (-d).expm1() + d


def sequence_weights(kind: Aggregation, lengths: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return the weight of each token of an update's sequences, float64 [B]. lengths: their loss
    tokens, int64 [B]. As it depends on the update and not on the microbatch, accumulation, packing
    and data parallelism add up to the same gradient.

    token_mean     1 / all tokens          every token alike (DAPO, arXiv 2503.14476, eq. 12)
    sequence_mean  1 / (B x its tokens)    every sequence alike (GRPO, arXiv 2402.03300, eq. 3)
    fixed_length   1 / (B x max_tokens)    a sequence's sum, scaled (Dr.GRPO, arXiv 2503.20783)
    """
    match kind:
        case "token_mean":
            return np.full(len(lengths), 1.0 / max(lengths.sum(), 1))
        case "sequence_mean":
            return 1.0 / (len(lengths) * np.maximum(lengths, 1))
        case "fixed_length":
            return np.full(len(lengths), 1.0 / (max(len(lengths), 1) * max_tokens))
