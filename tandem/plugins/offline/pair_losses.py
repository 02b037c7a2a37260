"""Losses over pairs of a chosen and a rejected answer. All inputs are float32 [B], sums (or means)
over answers, nats."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.rl.losses import Metrics, total


def margins(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor
) -> Tensor:
    """Return how much more the policy prefers the chosen answer than the reference does, [B]."""
    return (chosen - rejected) - (reference_chosen - reference_rejected)


def dpo(margin: Tensor, *, beta: float, label_smoothing: float = 0.0) -> tuple[Tensor, Metrics]:
    """Compute -log sigmoid(beta m) (DPO, arXiv 2305.18290, eq. 7).

    label_smoothing: share of pairs assumed to be the wrong way round (conservative DPO, Mitchell
    2023). Length-normalised DPO is the same on means of log-probs.
    """
    scaled = beta * margin
    losses = -(1 - label_smoothing) * F.logsigmoid(scaled) - label_smoothing * F.logsigmoid(-scaled)
    return losses, _pair_metrics(losses, scaled)


def ipo(margin: Tensor, *, beta: float) -> tuple[Tensor, Metrics]:
    """Compute (m - 1 / (2 beta))^2, which stays bounded for certain preferences (IPO, arXiv
    2310.12036, eq. 17; beta is its tau).

    Its authors take the margin of means over tokens; with sums, 1 / (2 beta) means something else
    for every length.
    """
    losses = (margin - 1 / (2 * beta)).square()
    return losses, _pair_metrics(losses, beta * margin)


def bradley_terry(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Metrics]:
    """Compute -log sigmoid(r_chosen - r_rejected) of a reward model's scores (Bradley, Terry 1952;
    arXiv 2203.02155, eq. 1)."""
    losses = -F.logsigmoid(chosen - rejected)
    return losses, _pair_metrics(losses, chosen - rejected)


def _pair_metrics(losses: Tensor, margin: Tensor) -> Metrics:
    """Sum loss, accuracy and margin. A tie, as every pair is before the first update, is half
    right."""
    right = (margin > 0).to(torch.float32) + 0.5 * (margin == 0)
    return {"loss": total(losses), "accuracy": total(right), "margin": total(margin)}
