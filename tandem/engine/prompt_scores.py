"""Log-probs of a prompt's own tokens, by the passes that compute its keys and values.

They are of the model's own distribution, at temperature 1 without filters, as vLLM's are; and equal
to the trainer's, as its head and softmax run here. Knows no requests.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from tandem.model.kernels import kernels_of
from tandem.model.linear import ExactLinear
from tandem.model.logprobs import as_summed, chunks, log_distribution
from tandem.types import Array, SamplingDistribution


class PromptScores(NamedTuple):
    """Scores of n tokens in a row: log-probs float32 [n] in nats, ranks int64 [n], 1 for the
    likeliest; the likeliest tokens int64 [n, k] and theirs float32 [n, k]."""

    logprobs: Array
    ranks: Array
    top_tokens: Array
    top_logprobs: Array


def score_tokens(
    head: ExactLinear, hidden: Tensor, targets: Tensor, top: int
) -> Iterator[PromptScores]:
    """Score targets int64 [n] after hidden states [n, D], some rows of logits at a time."""
    targets, plain = targets.to(hidden.device), SamplingDistribution()
    for rows in chunks(len(targets), head.weight):
        table = log_distribution(as_summed(head(hidden[rows]), plain), plain)
        own = table.gather(1, targets[rows, None])
        top_logprobs, top_tokens = kernels_of(table).likeliest(table, top)
        columns = own[:, 0], (table >= own).sum(-1), top_tokens, top_logprobs
        yield PromptScores(*(column.cpu().numpy() for column in columns))
