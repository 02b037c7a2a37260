"""Tokens that a sequence may not sample next: the ends of a turn before `min_tokens`.

Their logits are -inf before temperature, filters and softmax, so log-probs are of the distribution
that is left. Rows of other sequences keep their bits. The trainer has no masks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.scheduler import RunningSequence


def mask_logits(sequences: Sequence[RunningSequence], logits: Tensor) -> None:
    """Overwrite the logits [B, V] of the tokens that each sequence may not sample now."""
    for row, sequence in zip(logits, sequences, strict=True):
        params = sequence.request.params
        if len(sequence.tokens) < params.min_tokens:
            ends = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=row.device)
            row[ends] = float("-inf")
