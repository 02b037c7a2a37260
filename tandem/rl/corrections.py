"""Off-policy corrections: a weight for every token, from the probability ratio policy / engine at
the start of the step.

They are for an engine that is not exact, or for episodes of older weights. With P1 and fresh
episodes each of them is 1 everywhere. Inputs are float32 [N], nats; sequences int64 [N] as in
losses.py. No gradient passes.
"""

from typing import Literal

import torch
from torch import Tensor

from tandem.rl.losses import sequence_means, sequence_sums

Correction = Literal["none", "decoupled", "tis", "tis_sequence", "icepop", "mis", "mis_geometric"]


def importance(log_ratio: Tensor) -> Tensor:
    """Compute r, unchanged: with `ppo_clip` around the proximal policy this is decoupled PPO (arXiv
    2110.00641, eq. 5; AReaL, arXiv 2505.24298, eq. 5).

    It corrects each token given its prefix; prefixes and returns stay the engine's. So it is
    biased beyond one token (results/bias.md), and its variance is unbounded.
    """
    return log_ratio.exp()


def truncated(log_ratio: Tensor, cap: float) -> Tensor:
    """Compute min(r, cap) (truncated importance sampling, Ionides 2008; Yao et al. 2025 for
    engines)."""
    return log_ratio.exp().clamp(max=cap)


def truncated_sequence(log_ratio: Tensor, sequences: Tensor, cap: float) -> Tensor:
    """Compute min(product of r over the sequence, cap) for each of its tokens."""
    return sequence_sums(log_ratio, sequences).exp().clamp(max=cap)[sequences]


def icepop(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Keep r inside [low, high], else 0: tokens on which engine and trainer part are left out
    (IcePop, arXiv 2510.18855)."""
    ratio = log_ratio.exp()
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def masked_sequence(log_ratio: Tensor, sequences: Tensor, cap: float) -> Tensor:
    """Compute the product of r over the sequence, or 0 if it exceeds cap (MIS: sequences are
    masked, not truncated)."""
    ratio = sequence_sums(log_ratio, sequences).exp()
    return torch.where(ratio <= cap, ratio, 0.0)[sequences]


def masked_geometric(log_ratio: Tensor, sequences: Tensor, low: float, high: float) -> Tensor:
    """Keep r if the geometric mean of r over the sequence is inside [low, high], else 0 (verl's
    geometric rejection, NeMo-RL's seq-mask-tis)."""
    mean = sequence_means(log_ratio, sequences).exp()
    return torch.where((mean >= low) & (mean <= high), 1.0, 0.0)[sequences] * log_ratio.exp()


def correction(
    kind: Correction,
    proximal_logprobs: Tensor,
    engine_logprobs: Tensor,
    sequences: Tensor,
    *,
    low: float,
    cap: float,
) -> Tensor:
    """Compute the weight of each token's loss, [N]. low: of icepop and mis_geometric; cap: of all
    but decoupled."""
    log_ratio = (proximal_logprobs - engine_logprobs).detach()
    match kind:
        case "none":
            return torch.ones_like(log_ratio)
        case "decoupled":
            return importance(log_ratio)
        case "tis":
            return truncated(log_ratio, cap)
        case "tis_sequence":
            return truncated_sequence(log_ratio, sequences, cap)
        case "icepop":
            return icepop(log_ratio, low, cap)
        case "mis":
            return masked_sequence(log_ratio, sequences, cap)
        case "mis_geometric":
            return masked_geometric(log_ratio, sequences, low, cap)


def sequence_errors(
    proximal_logprobs: Tensor, engine_logprobs: Tensor, sequences: Tensor
) -> Tensor:
    """Average exp|policy - engine| over each sequence's tokens, [S]; 1 if the two agree."""
    return sequence_means((proximal_logprobs - engine_logprobs).abs().exp(), sequences)
