"""Weights by which the losses of tokens add up to one number, fixed for a whole update beforehand.

Because a weight depends on the update and not on the microbatch, accumulation, packing and data
parallelism add up to the same gradient.
"""

from typing import Literal

import numpy as np

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


def sequence_weights(kind: Aggregation, lengths: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return the weight of each token of an update's sequences, float64 [B]. lengths: their loss
    tokens, int64 [B].

    token_mean     1 / all tokens          every token alike (DAPO, arXiv 2503.14476, eq. 12)
    sequence_mean  1 / (B x its tokens)    every sequence alike (GRPO, arXiv 2402.03300, eq. 3)
    fixed_length   1 / (B x max_tokens)    a sequence's sum, scaled (Dr.GRPO, arXiv 2503.20783)
    """
    match kind:
        case "token_mean":
            return np.full(len(lengths), 1.0 / max(lengths.sum(), 1))
        case "sequence_mean":
            return 1.0 / (len(lengths) * np.maximum(lengths, 1))
        case "fixed_length":
            return np.full(len(lengths), 1.0 / (max(len(lengths), 1) * max_tokens))
