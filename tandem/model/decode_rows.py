"""The rows of a decode step as tensors of fixed places: what a plan needs that is captured once and
replayed. Knows no request and no schedule."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.model.paged_attention import PAGE, Runs


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRows:
    """Rows of at most one new token each. A row of count 0 is padding: it reads and writes no page.

    Two sequences, of 130 and of 4 tokens, and padding up to four rows: DecodeRows(
    tables=[[7, 2], [4, 0], [0, 0], [0, 0]], counts=[1, 1, 0, 0], positions=[129, 3, 0, 0],
    max_length=512)
    """

    tables: Tensor  # int32 [B, M], the pages of each sequence in order
    counts: Tensor  # int32 [B], 1 or 0; padding comes last
    positions: Tensor  # int64 [B], of the new tokens
    max_length: int  # greater than every position; it never changes a result
    tiles: Tensor | None = None  # int32, what the rows read together: ExactModel.shared_tiles

    def slots(self) -> Tensor:
        """Compute where each key goes, int64 [B]: page * PAGE + offset, or -1 for padding."""
        pages = self.tables.gather(1, (self.positions // PAGE)[:, None])[:, 0].long()
        return torch.where(self.counts > 0, pages * PAGE + self.positions % PAGE, -1)

    def runs(self) -> Runs:
        """Read the live rows back into the form that the CPU's plan takes."""
        live = int(self.counts.sum())
        starts = self.positions[:live].numpy().copy()
        return Runs(self.tables[:live].tolist(), starts, np.ones(live, np.int64))
