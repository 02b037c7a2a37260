"""Attention of a packed pass with gradients: the autograd function over the Triton kernels.

E, the head size, must be the contiguous dimension of q, k and v. This file knows no layers.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from tandem.model.triton.attention_backward_kernels import (
    LIST_ROWS,
    key_gradient_kernel,
    query_gradient_kernel,
)
from tandem.model.triton.ops import segment_attention

# A row of queries or keys of more bytes is computed in tiles of 32 instead of 64, so that a tile's
# keys, values and queries stay in a multiprocessor's shared memory.
WIDE_BYTES = 256


class PackedSegments:
    """The segments of a packed pass on the device of its tensors, and who sees which rows.

    segments: int64 [S, 4] as in types.Microbatch.
    """

    def __init__(self, segments: np.ndarray, device: torch.device):
        self.rows = torch.from_numpy(segments).to(device, torch.int32)  # [S, 4]
        self.columns = self.rows.t().contiguous()  # [4, S]
        self.viewers, self.starts = (
            torch.from_numpy(array.astype(np.int32)).to(device) for array in viewers_of(segments)
        )


def viewers_of(segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """List the segments that see a row of each block of LIST_ROWS packed rows, ascending.

    Returns (segments int64 [M], where the list of each block starts int64 [blocks + 1]).
    Example: with blocks of 64 rows a prompt of 70 rows and two responses of 10 that share it,
    [[0, 70, 0, 0], [70, 10, 0, 70], [80, 10, 0, 70]], give [0, 1, 2, 0, 1, 2], [0, 3, 6].
    """
    count = len(segments)
    first = np.concatenate((segments[:, 0], segments[:, 2]))
    rows = np.concatenate((segments[:, 1], segments[:, 3]))
    low, high = first // LIST_ROWS.value, -(-(first + rows) // LIST_ROWS.value)
    blocks = np.where(rows > 0, high - low, 0)
    within = np.arange(blocks.sum()) - (np.cumsum(blocks) - blocks).repeat(blocks)
    block = low.repeat(blocks) + within
    # ascending by block, then by segment; one that sees a block twice is there once
    pairs = np.unique(block * count + np.tile(np.arange(count), 2).repeat(blocks))
    return pairs % count, np.searchsorted(pairs // count, np.arange(block.max() + 2))


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, scale: float, window: int | None
) -> Tensor:
    """Attend q [T, H, E] over k and v [T, K, E] to [T, H, E], as `segment_attention`.

    Differentiable while gradients are on, with the same bits.
    """
    if not torch.is_grad_enabled():
        return segment_attention(q, k, v, segments.rows, scale, window)
    return _PackedAttention.apply(q, k, v, segments, scale, window)  # type: ignore[no-any-return]


class _PackedAttention(torch.autograd.Function):
    """Autograd function over q, k and v; it keeps them, the output and a log-sum-exp a query."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: PackedSegments,
        scale: float,
        window: int | None,
    ) -> Tensor:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        out = segment_attention(q, k, v, segments.rows, scale, window, lse=lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = (segments, scale, window)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _gradients(ctx.saved_tensors, grads[0].contiguous(), *ctx.call)
        return *gradients, None, None, None


def _gradients(
    saved: Sequence[Tensor],
    above: Tensor,
    segments: PackedSegments,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v from `above` [T, H, E]; rows of no segment get zeros."""
    q, k, v, out, lse = saved
    (tokens, heads, width), kv_heads = q.shape, k.shape[1]
    group, sequences = heads // kv_heads, segments.columns.shape[1]
    grads = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
    deltas = torch.empty_like(lse)
    block_e = max(16, triton.next_power_of_2(width))
    side = 32 if block_e * q.element_size() > WIDE_BYTES else 64
    numbers = (
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        scale * math.log2(math.e),
        scale,
        (1 << 30) if window is None else window,
    )
    tile = {"GROUP": group, "WIDTH": width, "BLOCK_E": block_e, "PAIRS": side, "KEYS": side}
    options = {"num_warps": 8, "num_stages": 1}
    query_gradient_kernel[tokens * group // side + sequences, kv_heads](
        *(q, k, v, out, above, lse, deltas, grads[0], segments.columns, sequences),
        *numbers,
        **tile,
        **options,
    )
    blocks = (len(segments.starts) - 1) * LIST_ROWS.value // side
    key_gradient_kernel[blocks, kv_heads](
        *(q, k, v, above, lse, deltas, grads[1], grads[2], segments.columns),
        *(segments.viewers, segments.starts, sequences, tokens),
        *numbers,
        **tile,
        **options,
    )
    return grads[0], grads[1], grads[2]
