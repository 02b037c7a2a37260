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


def correction(
    kind: Correction,
    proximal_logprobs: Tensor,
    engine_logprobs: Tensor,
    sequences: Tensor,
    *,
    low: float,
    cap: float,
) -> Tensor:
    """Compute the weight of each token's loss, [N], of its ratio r, and of R, the product of r over
    the tokens of its sequence.

    decoupled      r: with `ppo_clip` around the proximal policy this is decoupled PPO (arXiv
                   2110.00641, eq. 5; AReaL, arXiv 2505.24298, eq. 5). It corrects each token given
                   its prefix; prefixes and returns stay the engine's. So it is biased beyond one
                   token (results/bias.md), and its variance is unbounded.
    tis            min(r, cap) (truncated importance sampling, Ionides 2008; Yao et al. 2025 for
                   engines)
    tis_sequence   min(R, cap)
    icepop         r inside [low, cap], else 0: tokens on which engine and trainer part are left out
                   (IcePop, arXiv 2510.18855)
    mis            R, or 0 above cap: sequences are masked, not truncated
    mis_geometric  r where the geometric mean of r over the sequence is inside [low, cap], else 0
                   (verl's geometric rejection, NeMo-RL's seq-mask-tis)
    """
    log_ratio = (proximal_logprobs - engine_logprobs).detach()
    ratio = log_ratio.exp()
    match kind:
        case "none":
            return torch.ones_like(ratio)
        case "decoupled":
            return ratio
        case "tis":
            return ratio.clamp(max=cap)
        case "tis_sequence":
            return sequence_sums(log_ratio, sequences).exp().clamp(max=cap)[sequences]
        case "icepop":
            return torch.where((ratio >= low) & (ratio <= cap), ratio, 0.0)
        case "mis":
            product = sequence_sums(log_ratio, sequences).exp()
            return torch.where(product <= cap, product, 0.0)[sequences]
        case "mis_geometric":
            mean = sequence_means(log_ratio, sequences).exp()
            return torch.where((mean >= low) & (mean <= cap), 1.0, 0.0)[sequences] * ratio


def sequence_errors(
    proximal_logprobs: Tensor, engine_logprobs: Tensor, sequences: Tensor
) -> Tensor:
    """Average exp|policy - engine| over each sequence's tokens, [S]; 1 if the two agree."""
    return sequence_means((proximal_logprobs - engine_logprobs).abs().exp(), sequences)
