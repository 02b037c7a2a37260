"""Tokens that a sequence may not sample next: the ends of a turn before `min_tokens`, and what the
mask of its request leaves out.

Their logits are -inf before temperature, filters and softmax, so log-probs are of the distribution
that is left. Rows of other sequences keep their bits. The trainer has no masks.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.scheduler import RunningSequence
from tandem.types import Array


class TokenMask(Protocol):
    """Mask of one request, with a state of its own: what it has sampled rules what may follow."""

    def allowed(self, tokens: Sequence[int]) -> Array:
        """Return the tokens that may follow, as bool [V], at least one."""


def mask_logits(sequences: Sequence[RunningSequence], logits: Tensor) -> None:
    """Overwrite the logits [B, V] of the tokens that each sequence may not sample now."""
    for row, sequence in zip(logits, sequences, strict=True):
        params, mask = sequence.request.params, sequence.request.mask
        if len(sequence.tokens) < params.min_tokens:
            ends = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=row.device)
            row[ends] = float("-inf")
        if mask is not None:
            allowed = torch.from_numpy(mask.allowed(sequence.tokens)).to(row.device)
            row.masked_fill_(~allowed, float("-inf"))
