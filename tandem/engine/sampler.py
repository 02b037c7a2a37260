"""Draw the next token of each row by inverse CDF from one addressed uniform. Knows nothing of requests or caches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.model.logprobs import Filter, Seen, log_distribution, penalize


@dataclass(frozen=True, slots=True)
class Drawn:
    """tokens int64 [B] and their log-probs float32 [B]; the likeliest tokens int64 [B, k] and theirs float32 [B, k]."""

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


def sample(logits: Tensor, how: Filter, uniform: Tensor, seen: Seen | None = None, top: int = 0) -> Drawn:
    """logits [B, V] (overwritten), uniform float32 [B] in [0, 1) -> what was drawn, with its log-probs in nats.

    Temperature 0 takes the likeliest token and reports its log-prob at temperature 1, without filters. seen is needed
    with a repetition penalty.
    """
    if how.repetition_penalty != 1.0:
        assert seen is not None, "a repetition penalty needs the tokens seen before"
        penalize(logits, how.repetition_penalty, seen)
    greedy = how.temperature == 0
    table = log_distribution(logits, Filter() if greedy else how)
    tokens = table.argmax(-1) if greedy else _inverse_cdf(table, uniform)
    likeliest = table.topk(top, -1)
    return Drawn(tokens, table.gather(1, tokens[:, None])[:, 0], likeliest.indices, likeliest.values)


def _inverse_cdf(table: Tensor, uniform: Tensor) -> Tensor:
    cdf = table.exp().cumsum(-1)
    total = cdf[:, -1]
    # strictly below the total, so that the token found has positive probability
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target[:, None], right=True)[:, 0]
