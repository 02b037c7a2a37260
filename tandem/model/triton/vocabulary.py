"""Log-probs over the vocabulary on tensors, without gradients: they launch its kernels.

Logits [N, V] are contiguous within a row. This file knows no filters and no chunks.
"""

import torch
import triton
from torch import Tensor

from tandem.model.triton.vocabulary_kernels import (
    log_softmax_kernel,
    logprob_slope_kernel,
    token_logprob_kernel,
)

BLOCK = 4096


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Compute the log-probs [N, V], float32, of logits / temperature."""
    logits = _aligned(logits)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    log_softmax_kernel[(len(logits),)](logits, out, *_shape(logits, temperature), **_tile(logits))
    return out


def target_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute (log-probs [N] of targets int64 [N], entropies [N] or None), float32, in nats.

    They are those of softmax(logits / temperature), to the bits of `log_softmax`.
    """
    logits = _aligned(logits)
    logprobs = logits.new_empty(len(logits), dtype=torch.float32)
    entropies = torch.empty_like(logprobs) if entropy else None
    token_logprob_kernel[(len(logits),)](
        logits, targets, logprobs, entropies, *_shape(logits, temperature), **_tile(logits)
    )
    return logprobs, entropies


def logprob_slope(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    above: Tensor | None,
    above_entropy: Tensor | None,
) -> Tensor:
    """Compute d loss / d (logits / temperature) [N, V], float32.

    above and above_entropy [N] are the gradients of `target_logprobs`.
    """
    logits = _aligned(logits)
    slope = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    above, above_entropy = (
        None if grad is None else grad.contiguous() for grad in (above, above_entropy)
    )
    logprob_slope_kernel[(len(logits),)](
        logits, targets, above, above_entropy, slope, *_shape(logits, temperature), **_tile(logits)
    )
    return slope


def _aligned(logits: Tensor) -> Tensor:
    """Copy logits unless they begin at a multiple of 16 bytes, as `rowwise` does."""
    return logits.clone() if logits.data_ptr() % 16 else logits


def _shape(logits: Tensor, temperature: float) -> tuple[int, int, float]:
    return logits.shape[1], logits.stride(0), temperature


def _tile(logits: Tensor) -> dict[str, int]:
    """Choose the block by the vocabulary alone."""
    return {"BLOCK": min(BLOCK, triton.next_power_of_2(logits.shape[1])), "num_warps": 8}
