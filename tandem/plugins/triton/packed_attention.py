"""Attention of a packed pass with gradients: the autograd function, and the backward pass in Triton
(FlashAttention-2, Dao 2023, arXiv 2307.08691, algorithm 2), with every sum in one fixed order.

Probabilities are computed again from the log-sum-exp that the forward pass stored. A program of
`query_gradient_kernel` owns a tile of queries and walks its keys in order. A program of
`key_gradient_kernel` owns a block of keys and walks the segments that see one of them, in order,
and of each its queries in order: so the gradient of a prefix is summed over the segments that share
it without atomics. Gradients are deterministic and not batch-invariant. E, the head size, must be
the contiguous dimension of q, k and v. Knows no layers.
"""

# Code that @triton.jit compiles is not typed Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.attention import Scoring
from tandem.plugins.triton.attention import locate, scale_and_window, segment_attention
from tandem.plugins.triton.matmul import dot

# packed rows for which one list of segments says who sees them; a multiple of every key block
LIST_ROWS = tl.constexpr(64)
# beyond every row; times the query heads of a group it is still an int32
NOWHERE = tl.constexpr(1 << 24)


@triton.jit
def _segment(segments, number, sequences):
    """Load (first row, rows, first row of the prefix, rows of the prefix) of a segment."""
    at = segments + number
    return (
        tl.load(at),
        tl.load(at + sequences),
        tl.load(at + 2 * sequences),
        tl.load(at + 3 * sequences),
    )


@triton.jit
def _slopes(query, key, value, above, visible, lse, delta, scale):
    """Compute probabilities [R, N] of a tile, and the gradients of its scaled scores; or, of query
    and key exchanged and above and value too, [N, R]."""
    scores = dot(query, tl.trans(key), tl.zeros_like(visible).to(tl.float32)) * scale
    probs = tl.where(visible, tl.exp2(scores - lse), 0.0)
    grad_probs = dot(above, tl.trans(value), tl.zeros_like(probs))
    return probs, tl.where(visible, probs * (grad_probs - delta), 0.0)


@triton.jit(do_not_specialize=["sequences", "window"])
def query_gradient_kernel(
    q,
    k,
    v,
    out,
    above,
    lse,
    deltas,
    grad_q,
    segments,
    sequences,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    scale,
    grad_scale,
    window,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute grad_q of PAIRS (token, query head) pairs of one segment and key/value head.

    It also stores their deltas [T, H], the sums of out * above, which `key_gradient_kernel` reads.
    out, above and grad_q are contiguous [T, H, E], segments int32 [4, S].
    """
    number, tile = locate(segments + sequences, sequences, tl.program_id(0), GROUP, PAIRS)
    if number >= sequences:
        return
    kv_head, heads = tl.program_id(1), tl.num_programs(1) * GROUP
    own, new, prefix, past = _segment(segments, number, sequences)
    pair = tile * PAIRS + tl.arange(0, PAIRS)
    token, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    position = past + token
    end = past + tl.minimum(new, (tile * PAIRS + PAIRS - 1) // GROUP + 1)
    begin = tl.maximum(0, past + tile * PAIRS // GROUP - window + 1)

    element, known = tl.arange(0, BLOCK_E), token < new
    inside = known[:, None] & (element < WIDTH)
    row = (own + token).to(tl.int64)
    at = row * heads + head
    where = at[:, None] * WIDTH + element
    query = tl.load(q + (row * q_token + head * q_head)[:, None] + element, mask=inside, other=0.0)
    grad = tl.load(above + where, mask=inside, other=0.0)
    result = tl.load(out + where, mask=inside, other=0.0)
    delta = tl.sum(result.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(deltas + at, delta, mask=known)
    total = tl.load(lse + at, mask=known, other=0.0)
    acc = tl.zeros([PAIRS, BLOCK_E], tl.float32)
    for base in range(begin // KEYS * KEYS, end, KEYS):
        index = base + tl.arange(0, KEYS)
        place = tl.where(index < past, prefix + index, own + index - past).to(tl.int64)
        there = (index < end)[:, None] & (element < WIDTH)
        key = tl.load(
            k + (place * k_token + kv_head * k_head)[:, None] + element, mask=there, other=0.0
        )
        value = tl.load(
            v + (place * v_token + kv_head * v_head)[:, None] + element, mask=there, other=0.0
        )
        visible = (index <= position[:, None]) & (index > position[:, None] - window)
        visible &= known[:, None]
        _, slope = _slopes(query, key, value, grad, visible, total[:, None], delta[:, None], scale)
        acc = dot(slope.to(key.dtype), key, acc)
    tl.store(grad_q + where, (acc * grad_scale).to(grad_q.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sequences", "tokens", "window"])
def key_gradient_kernel(
    q,
    k,
    v,
    above,
    lse,
    deltas,
    grad_k,
    grad_v,
    segments,
    viewers,
    starts,
    sequences,
    tokens,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    scale,
    grad_scale,
    window,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute grad_k and grad_v, contiguous [T, K, E], of KEYS packed rows and a key/value head.

    viewers int32 lists the segments that see a row of each LIST_ROWS, list n from starts[n] to
    starts[n + 1].
    """
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    heads = kv_heads * GROUP
    row = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    element, place = tl.arange(0, BLOCK_E), row.to(tl.int64)
    there = (row < tokens)[:, None] & (element < WIDTH)
    key = tl.load(
        k + (place * k_token + kv_head * k_head)[:, None] + element, mask=there, other=0.0
    )
    value = tl.load(
        v + (place * v_token + kv_head * v_head)[:, None] + element, mask=there, other=0.0
    )
    grad_key = tl.zeros([KEYS, BLOCK_E], tl.float32)
    grad_value = tl.zeros([KEYS, BLOCK_E], tl.float32)
    block = tl.program_id(0) * KEYS // LIST_ROWS
    for listed in range(tl.load(starts + block), tl.load(starts + block + 1)):
        own, new, prefix, past = _segment(segments, tl.load(viewers + listed), sequences)
        before = (row >= prefix) & (row < prefix + past)
        known = before | ((row >= own) & (row < own + new))
        # where the segment's queries see the key
        index = tl.where(before, row - prefix, past + row - own)
        first = tl.maximum(0, tl.min(tl.where(known, index, NOWHERE), 0) - past)
        last = tl.minimum(new, tl.max(tl.where(known, index, -NOWHERE), 0) + window - past)
        for base in range(first * GROUP // PAIRS * PAIRS, last * GROUP, PAIRS):
            pair = base + tl.arange(0, PAIRS)
            token, head = pair // GROUP, kv_head * GROUP + pair % GROUP
            position, asks = past + token, token < new
            inside = asks[:, None] & (element < WIDTH)
            query_row = (own + token).to(tl.int64)
            at = query_row * heads + head
            query = tl.load(
                q + (query_row * q_token + head * q_head)[:, None] + element, mask=inside, other=0.0
            )
            grad = tl.load(above + at[:, None] * WIDTH + element, mask=inside, other=0.0)
            total = tl.load(lse + at, mask=asks, other=0.0)
            delta = tl.load(deltas + at, mask=asks, other=0.0)
            visible = (index[:, None] <= position) & (index[:, None] > position - window)
            visible &= known[:, None] & asks
            # by keys, so that the products below read them from registers
            probs, slope = _slopes(key, query, grad, value, visible, total, delta, scale)
            grad_value = dot(probs.to(grad.dtype), grad, grad_value)
            grad_key = dot(slope.to(query.dtype), query, grad_key)
    where = (place * kv_heads + kv_head)[:, None] * WIDTH + element
    tl.store(grad_k + where, (grad_key * grad_scale).to(grad_k.dtype.element_ty), mask=there)
    tl.store(grad_v + where, grad_value.to(grad_v.dtype.element_ty), mask=there)


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
    q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, scoring: Scoring
) -> Tensor:
    """Attend q [T, H, E] over k and v [T, K, E] to [T, H, E], as `segment_attention`.

    Differentiable while gradients are on, with the same bits.
    """
    if not torch.is_grad_enabled():
        return segment_attention(q, k, v, segments.rows, scoring)
    return _PackedAttention.apply(q, k, v, segments, scoring)  # type: ignore[no-any-return]


class _PackedAttention(torch.autograd.Function):
    """Autograd function over q, k and v; it keeps them, the output and a log-sum-exp a query."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, scoring: Scoring
    ) -> Tensor:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        out = segment_attention(q, k, v, segments.rows, scoring, lse=lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = (segments, scoring)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _gradients(ctx.saved_tensors, grads[0].contiguous(), *ctx.call)
        return *gradients, None, None


def _gradients(
    saved: Sequence[Tensor], above: Tensor, segments: PackedSegments, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v from `above` [T, H, E]; rows of no segment get zeros."""
    q, k, v, out, lse = saved
    (tokens, heads, width), kv_heads = q.shape, k.shape[1]
    group, sequences = heads // kv_heads, segments.columns.shape[1]
    grads = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
    deltas = torch.empty_like(lse)
    block_e = max(16, triton.next_power_of_2(width))
    side = 32 if block_e * q.element_size() > WIDE_BYTES else 64
    scale, window = scale_and_window(scoring)
    strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
    numbers = *strides, scale, scoring.scale, window
    tile = {"GROUP": group, "WIDTH": width, "BLOCK_E": block_e, "PAIRS": side, "KEYS": side}
    options = {"num_warps": 8, "num_stages": 2}
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
