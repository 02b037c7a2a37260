"""Draw the next token of each row by inverse CDF from one addressed uniform. Knows nothing of requests or caches."""

import torch
from torch import Tensor

from tandem.model.logprobs import Filter, log_distribution


def sample(logits: Tensor, how: Filter, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, V], uniform float32 [B] in [0, 1) -> tokens int64 [B], log-probs float32 [B] of what was drawn.

    Temperature 0 takes the likeliest token and reports its log-prob at temperature 1.
    """
    greedy = how.temperature == 0
    table = log_distribution(logits, Filter() if greedy else how)
    tokens = table.argmax(-1) if greedy else _inverse_cdf(table, uniform)
    return tokens, table.gather(1, tokens[:, None])[:, 0]


def _inverse_cdf(table: Tensor, uniform: Tensor) -> Tensor:
    cdf = table.exp().cumsum(-1)
    total = cdf[:, -1]
    # strictly below the total, so that the token found has positive probability
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target[:, None], right=True)[:, 0]
