"""Log-probs, entropies, values and divergences of a microbatch: each [N], one for a loss token.

They come back to the CPU, whatever the model's device: losses are arithmetic over a few thousand
numbers, and their sums have a fixed order there.
"""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.model.divergence import Divergence, Head, divergences
from tandem.model.load import ExactModel
from tandem.model.logprobs import SeenTokens, token_logprobs
from tandem.model.triton.dispatch import triton_for
from tandem.types import Microbatch, SamplingDistribution


def batch_logprobs(
    model: ExactModel,
    batch: Microbatch,
    sampling: SamplingDistribution,
    expected: Tensor | None = None,
    *,
    entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute (log-probs, entropies), float32 [N], of the batch's targets under the model.

    expected and entropy: as in token_logprobs.
    """
    hidden, weight, packed = _head(model, batch)
    targets = torch.from_numpy(batch.targets).to(model.device)
    seen = None if sampling.repetition_penalty == 1.0 else partial(_seen, batch, model.device)
    expected = None if expected is None else expected.to(model.device)
    logprobs, entropies = token_logprobs(
        hidden, weight, packed, targets, sampling, seen, expected, entropy
    )
    return logprobs.cpu(), entropies.cpu()


@torch.no_grad()
def reference_logprobs(
    reference: ExactModel, batch: Microbatch, sampling: SamplingDistribution
) -> Tensor:
    """Compute log-probs float32 [N] of the targets under the model without its adapter, if any."""
    with reference.adapter_off():
        return batch_logprobs(reference, batch, sampling, entropy=False)[0]


def batch_values(model: ExactModel, batch: Microbatch) -> Tensor:
    """Compute a value model's value of the state before each target, float32 [N]."""
    return model.head(_hidden(model, batch))[:, 0].float().cpu()


def teacher_divergences(
    student: ExactModel,
    teacher: ExactModel,
    batch: Microbatch,
    temperature: float,
    divergence: Divergence,
) -> Tensor:
    """Compute the divergence over the vocabulary at the place of each target, float32 [N]."""
    with torch.no_grad():
        teacher_head = _head(teacher, batch)
    return divergences(_head(student, batch), teacher_head, temperature, divergence).cpu()


def _head(model: ExactModel, batch: Microbatch) -> Head:
    return _hidden(model, batch), model.head.weight, model.head.pack.of(model.head.weight)


def _hidden(model: ExactModel, batch: Microbatch) -> Tensor:
    """Compute the states that predict the targets, [N, D] of the model's type."""
    plan = model.packed_plan(batch.segments)
    hidden = model.hidden(torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions), plan)
    rows = torch.from_numpy(batch.rows).to(model.device)
    if triton_for(hidden):
        # a row before several responses is there several times; on a GPU index_select would sum
        # its gradients in no fixed order, the embedding sorts them
        return F.embedding(rows, hidden)
    return hidden.index_select(0, rows)


def _seen(batch: Microbatch, device: torch.device, start: int, stop: int) -> SeenTokens:
    """Collect the distinct tokens before each of the targets start .. stop - 1.

    Those are the tokens of the target's segment up to the row that predicts it, and its prefix.
    """
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
