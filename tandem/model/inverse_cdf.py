"""The token of a uniform number, by the inverse of the cumulative distribution. Knows no engine:
the probe tries it on the machine at hand, too."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.model.triton.dispatch import triton_for

BLOCK = 128  # tokens of the vocabulary


def inverse_cdf(table: Tensor, uniform: Tensor) -> Tensor:
    """Find tokens int64 [B] in log-probs [B, V], -inf where filtered, by uniform float32 [B] in [0,
    1); they have positive probability.

    On a CPU in two levels, block of the vocabulary and token in it: one running sum over the
    vocabulary takes three times as long.
    """
    if triton := triton_for(table):
        return triton.inverse_cdf(table, uniform)  # type: ignore[no-any-return]
    probs = F.pad(table.exp(), (0, -table.shape[1] % BLOCK)).view(len(table), -1, BLOCK)
    cdf = probs.sum(-1).cumsum(-1)
    block, rest = _search(cdf, uniform * cdf[:, -1])
    token, _ = _search(probs[torch.arange(len(table), device=table.device), block].cumsum(-1), rest)
    return block * BLOCK + token


def _search(cdf: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Find target [B] in cdf [B, n]: the first index with a greater cdf, int64 [B], and the
    distance into it [B]."""
    total = cdf[:, -1]
    # strictly below the total, so that the token found has positive probability
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cdf, target[:, None], right=True)
    before = F.pad(cdf, (1, 0)).gather(1, place)
    return place[:, 0], target - before[:, 0]
