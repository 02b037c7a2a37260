"""The experts that the tokens of a pass go to: recorded for an engine, or replayed for a trainer.

With rl.router_replay a trainer computes with the choices that the engine made (R3, Ma et al. 2025,
arXiv 2510.11370): the weights of the given experts come from its own router. As engine and trainer
agree, the choices of fresh tokens are the trainer's own, and `changed` checks it. Knows no loss.
"""

from typing import Protocol

import torch
from torch import Tensor

from tandem.types import Array, Microbatch


class ExpertChoices(Protocol):
    """The choices of one pass over all layers."""

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """Return the experts int64 [T, k] of a layer's rows. own: those that its router chooses."""


class RecordedExperts:
    """The routers' own choices, written into a table int16 [pages, PAGE, layers, k]: those of row
    t at pages[t], offsets[t]. Later rows are padding."""

    def __init__(self, table: Tensor, pages: Tensor, offsets: Tensor):
        self._table, self._pages, self._offsets = table, pages, offsets

    def choose(self, layer: int, own: Tensor) -> Tensor:
        self._table[self._pages, self._offsets, layer] = own[: len(self._pages)].short()
        return own


class ReplayedExperts:
    """Given choices, int16 [T, layers, k]; rows after them are padding and choose themselves."""

    def __init__(self, experts: Array, device: torch.device):
        self._given = torch.from_numpy(experts).to(device)
        self._changed: dict[int, Tensor] = {}  # by layer, choices of each row that differ

    def choose(self, layer: int, own: Tensor) -> Tensor:
        given = self._given[:, layer].long()
        self._changed[layer] = (given[:, :, None] != own[: len(given), None]).all(-1).sum(-1)
        return torch.cat([given, own[len(given) :]])

    def changed(self, rows: Array) -> Tensor:
        """Return the share of the choices of some rows, int64 [N], that are not those of the
        trainer's routers in the pass so far: float32 [N], on the CPU."""
        per_row = torch.stack(list(self._changed.values())).sum(0).cpu()
        return per_row[torch.from_numpy(rows)] / (len(self._changed) * self._given.shape[-1])


def replayed_experts(batch: Microbatch, device: torch.device) -> ReplayedExperts | None:
    """Return the choices that came with a microbatch; None if none did."""
    return ReplayedExperts(batch.experts, device) if len(batch.experts) else None
