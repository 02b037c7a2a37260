"""What the models say about a microbatch: log-probs, entropies, values, divergences. Each [N], one
a loss token."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from tandem.model.divergence import Divergence, Head, divergences
from tandem.model.load import ExactModel
from tandem.model.logprobs import SamplingDistribution, SeenTokens, token_logprobs
from tandem.types import Microbatch


def batch_logprobs(
    model: ExactModel,
    batch: Microbatch,
    how: SamplingDistribution,
    expected: Tensor | None = None,
    *,
    entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy) float32 [N] of the batch's targets under the model; the rest as in
    token_logprobs."""
    hidden, weight, packed = _head(model, batch)
    targets = torch.from_numpy(batch.targets).to(model.device)
    seen = None if how.repetition_penalty == 1.0 else partial(_seen, batch, model.device)
    return token_logprobs(hidden, weight, packed, targets, how, seen, expected, entropy)


@torch.no_grad()
def reference_logprobs(
    reference: ExactModel, batch: Microbatch, how: SamplingDistribution
) -> Tensor:
    """float32 [N]; of a policy with adapters, the reference is the same model without them."""
    with reference.adapter_off():
        return batch_logprobs(reference, batch, how, entropy=False)[0]


def batch_values(model: ExactModel, batch: Microbatch) -> Tensor:
    """float32 [N]: a value model's value of the state before each target."""
    return model.head(_hidden(model, batch))[:, 0]


def teacher_divergences(
    student: ExactModel,
    teacher: ExactModel,
    batch: Microbatch,
    temperature: float,
    divergence: Divergence,
) -> Tensor:
    """float32 [N]: the divergence over the vocabulary where each target was sampled."""
    with torch.no_grad():
        fixed = _head(teacher, batch)
    return divergences(_head(student, batch), fixed, temperature, divergence)


def _head(model: ExactModel, batch: Microbatch) -> Head:
    return _hidden(model, batch), model.head.weight, model.head.pack.of(model.head.weight)


def _hidden(model: ExactModel, batch: Microbatch) -> Tensor:
    """float32 [N, D]: the states that predict the targets."""
    plan = model.packed_plan(batch.segments)
    hidden = model.hidden(torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions), plan)
    return hidden.index_select(0, torch.from_numpy(batch.rows).to(model.device))


def _seen(batch: Microbatch, device: torch.device, start: int, stop: int) -> SeenTokens:
    """The distinct tokens before targets start .. stop - 1: their segment's up to the row that
    predicts, and its prefix's."""
    first, _, prefix_first, prefix = batch.segments.T
    rows = batch.rows[start:stop]
    # segments are in the order of their rows
    owner = np.searchsorted(first, rows, side="right") - 1
    tokens = [
        np.union1d(
            batch.tokens[prefix_first[s] : prefix_first[s] + prefix[s]],
            batch.tokens[first[s] : row + 1],
        )
        for s, row in zip(owner, rows, strict=True)
    ]
    index = np.arange(len(tokens)).repeat([len(t) for t in tokens])
    return SeenTokens(
        torch.from_numpy(index).to(device), torch.from_numpy(np.concatenate(tokens)).to(device)
    )
