"""Statistics of the routers of a mixture of experts in an update, and the loss that balances them.

Each microbatch is looked at by itself; padding is left out, and a prompt shared by several
responses counts once. The means over an update weigh each microbatch by its tokens, so neither the
statistics nor the loss's weight depend on who runs which.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.model.experts import ExactRouter
from tandem.model.row_parts import WHOLE
from tandem.rl.losses import Metrics
from tandem.trainer.ranks import Loss
from tandem.types import Microbatch

if TYPE_CHECKING:
    from tandem.model.load import ExactModel


@dataclass(frozen=True, slots=True)
class Routing:
    """Choices of one layer's router for n tokens."""

    counts: Tensor  # int64 [experts], the tokens that each has got
    probabilities: Tensor  # float [experts], sums over the tokens, differentiable
    entropy: Tensor  # float [], sum over the tokens, nats


def observe_routers(
    model: "ExactModel", loss: Loss, microbatches: Sequence[Microbatch], divisor: int, coef: float
) -> Loss:
    """Let a loss of an update's microbatches also report on the model's routers, and balance them.

    divisor: what metrics are divided by in the end. coef: of the balancing loss. The loss of a
    model without routers is returned as it is, and so is that of a process that computes a part of
    the rows. A stage of a pipeline reports on its own layers.
    """
    routers = [part for part in model.modules() if isinstance(part, ExactRouter)]
    if not routers or model.row_parts is not WHOLE:
        return loss
    num_tokens = sum(len(batch.tokens) for batch in microbatches)

    def observed(batch: Microbatch) -> tuple[Tensor, Metrics]:
        size = len(batch.tokens)
        with _recording(routers, size) as layers:
            value, metrics = loss(batch)
        statistics, share = routing_metrics(layers, size), size / num_tokens
        if coef:
            balance = balance_loss(layers, size)
            statistics["router/aux_loss"] = float(balance.detach())
            value = value + coef * share * balance.to(value.device)
        own = {name: found * share * divisor for name, found in statistics.items()}
        return value, {**metrics, **own}

    return observed


def routing_of(probabilities: Tensor, chosen: Tensor) -> Routing:
    """Sum up a router's probabilities [n, experts] and chosen experts int64 [n, k]."""
    flat, known = chosen.flatten(), probabilities.detach()
    counts = flat.new_zeros(probabilities.shape[1]).scatter_add_(0, flat, torch.ones_like(flat))
    return Routing(counts, probabilities.sum(0), torch.special.entr(known).sum())


def routing_metrics(layers: Sequence[Routing], size: int) -> Metrics:
    """Return means over the layers, of `size` tokens: the busiest expert's load over an even share,
    the entropy of a token's probabilities in nats, and the share of experts without a token."""
    counts = torch.stack([layer.counts for layer in layers])  # [L, experts]
    entropy = torch.stack([layer.entropy for layer in layers]) / size
    load = counts / counts.sum(1, keepdim=True) * counts.shape[1]
    columns = torch.stack([load.amax(1).double(), entropy.double(), (counts == 0).double().mean(1)])
    names = ("router/max_load", "router/entropy", "router/unused")
    return dict(zip(names, columns.mean(1).tolist(), strict=True))


def balance_loss(layers: Sequence[Routing], size: int) -> Tensor:
    """Compute experts * sum_e f_e P_e over `size` tokens and all layers together: f_e the experts
    numbered e that a token gets, P_e the mean of their probabilities. At an even load it is k
    (Switch Transformer, Fedus et al. 2021, arXiv 2101.03961, eq. 4 to 6, for k experts a token as
    in transformers)."""
    rows = size * len(layers)
    frequency = torch.stack([layer.counts for layer in layers]).sum(0) / rows
    probability = torch.stack([layer.probabilities for layer in layers]).sum(0) / rows
    return (frequency * probability).sum() * len(frequency)


@contextmanager
def _recording(routers: Sequence[ExactRouter], size: int) -> Iterator[list[Routing]]:
    """Collect what the routers do with the first `size` rows, which others only pad. Inside of
    activation checkpoints it keeps nothing for the backward pass, which would run it again."""
    layers: list[Routing] = []

    def observe(probabilities: Tensor, chosen: Tensor) -> None:
        layers.append(routing_of(probabilities[:size], chosen[:size]))

    for router in routers:
        router.observe = observe
    try:
        yield layers
    finally:
        for router in routers:
            router.observe = None
