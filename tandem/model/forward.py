"""Log-probs, entropies and values of a microbatch: each [N], one for a loss token.

They come back to the CPU, whatever the model's device: losses are arithmetic over a few thousand
numbers, and their sums have a fixed order there.
"""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tandem.model.attention import Plan
from tandem.model.expert_choices import ExpertChoices
from tandem.model.kernels import kernels_of
from tandem.model.logprobs import Head, SeenTokens, token_logprobs
from tandem.runtime.image_tokens import text_tokens
from tandem.types import Array, Microbatch, SamplingDistribution

if TYPE_CHECKING:
    from tandem.model.load import ExactModel


def batch_logprobs(
    model: "ExactModel",
    batch: Microbatch,
    sampling: SamplingDistribution,
    expected: Tensor | None = None,
    *,
    entropy: bool = True,
    choices: ExpertChoices | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute (log-probs, entropies), float32 [N], of the batch's targets under the model.

    expected and entropy: as in token_logprobs; choices: of experts, as in ExactModel.hidden.
    """
    own, _ = model.row_parts.targets(batch)
    targets = torch.from_numpy(batch.targets[own]).to(model.device)
    penalized = sampling.repetition_penalty != 1.0
    seen = partial(_seen, batch, batch.rows[own], model.device) if penalized else None
    expected = None if expected is None else expected[own].to(model.device)

    def compute() -> list[Tensor]:
        head = batch_head(model, batch, choices)
        found = token_logprobs(head, targets, sampling, seen, expected, entropy)
        return [model.row_parts.gather(values, batch) for values in found]

    logprobs, entropies = model(compute)
    return logprobs.cpu(), entropies.cpu()


@torch.no_grad()
def reference_logprobs(
    reference: "ExactModel", batch: Microbatch, sampling: SamplingDistribution
) -> Tensor:
    """Compute log-probs float32 [N] of the targets under the model without its adapter, if any."""
    with reference.adapter_off():
        return batch_logprobs(reference, batch, sampling, entropy=False)[0]


def batch_values(model: "ExactModel", batch: Microbatch) -> Tensor:
    """Compute a value model's value of the state before each target, float32 [N]."""

    def compute() -> Tensor:
        # a copy, because FSDP's root may not return a view
        values = model.head(_hidden(model, batch))[:, 0].to(torch.float32, copy=True)
        return model.row_parts.gather(values, batch)

    found: Tensor = model(compute)
    return found.cpu()


def batch_head(
    model: "ExactModel", batch: Microbatch, choices: ExpertChoices | None = None
) -> Head:
    """Return the head before the targets of the batch."""
    return head_of(model, _hidden(model, batch, choices))


def head_of(model: "ExactModel", hidden: Tensor) -> Head:
    """Return a model's output projection of hidden states [N, D]."""
    weight, bias = model.head.weight, model.head.bias
    return Head(hidden, weight, model.head.pack.of(weight), bias, model.softcap)


def batch_states(model: "ExactModel", batch: Microbatch) -> Tensor:
    """Compute the states [T', D] that a stage of a pipeline gives to the next one."""
    found: Tensor = model(lambda: model.states(*_inputs(model, batch)))
    return found


def _inputs(model: "ExactModel", batch: Microbatch) -> tuple[Tensor, Tensor, Plan]:
    """Return (tokens, positions, plan) of the rows that this process computes."""
    tokens, positions = map(torch.from_numpy, model.row_parts.rows(batch))
    return tokens, positions, model.row_parts.plan(model.packed_plan(batch.segments))


def _hidden(model: "ExactModel", batch: Microbatch, choices: ExpertChoices | None = None) -> Tensor:
    """Compute the states that predict this process's targets, [n, D] of the model's type."""
    hidden = model.hidden(*_inputs(model, batch), choices)
    rows = torch.from_numpy(model.row_parts.targets(batch)[1]).to(model.device)
    # a row before several responses is there several times
    return kernels_of(hidden).rows(hidden, rows)


def _seen(
    batch: Microbatch, rows: Array, device: torch.device, start: int, stop: int
) -> SeenTokens:
    """Collect the distinct tokens before each of the targets start .. stop - 1 of `rows`, which
    predict them.

    Those are the tokens of the target's segment up to its row, and its prefix.
    """
    first, _, prefix_first, prefix = batch.segments.T
    rows = rows[start:stop]
    # segments are in the order of their rows
    owner = np.searchsorted(first, rows, side="right") - 1
    tokens = [
        text_tokens(
            np.union1d(
                batch.tokens[prefix_first[s] : prefix_first[s] + prefix[s]],
                batch.tokens[first[s] : row + 1],
            )
        )
        for s, row in zip(owner, rows, strict=True)
    ]
    index = np.arange(len(tokens)).repeat([len(t) for t in tokens])
    return SeenTokens(
        torch.from_numpy(index).to(device), torch.from_numpy(np.concatenate(tokens)).to(device)
    )
