"""Decode from shared pages in Triton: a split of keys that neighbours have in common is read once.

Of the 16 (token, query head) pairs in a tile of `attend_kernel`, decode fills those of one token.
Here a tile holds the tokens of several sequences, where they have all pages of a split of 512 keys
in common. Blocks, splits and the order of sums are those of `kernels.py`, and so are the bits.
"""

# Code that @triton.jit compiles is not typed Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.triton.attention_kernels import (
    BLOCK_KEYS,
    BLOCK_Q,
    SPLIT_KEYS,
    _join,
    _see,
    merge_kernel,
)
from tandem.model.triton.ops import SCRATCH_BYTES, PagedRows


def split_tiles(tables: np.ndarray, starts: np.ndarray, page: int, group: int) -> np.ndarray | None:
    """Plan int32 [2, splits, S]: the first sequence of each tile of a split, and their number.

    Every sequence decodes one token, and a number of 0 is no tile. tables int64 [S, M], starts
    int64 [S], page: tokens of a page, group: query heads of a key/value head. None if no two
    sequences would share a tile.
    """
    most, sequences = BLOCK_Q.value // group, len(starts)
    splits, pages = triton.cdiv(int(starts.max()) + 1, SPLIT_KEYS.value), SPLIT_KEYS.value // page
    plan = np.zeros((2, splits, sequences), np.int32)
    for split in range(splits if most > 1 else 0):
        own = tables[:, split * pages : (split + 1) * pages]
        past = starts >= (split + 1) * SPLIT_KEYS.value - 1  # it sees every key of the split
        same = (own[1:] == own[:-1]).all(1) & past[1:] & past[:-1]
        begins = np.flatnonzero(np.append(True, ~same))
        sizes = np.diff(begins, append=sequences)
        tiles = -(-sizes // most)
        before = most * (np.arange(tiles.sum()) - (np.cumsum(tiles) - tiles).repeat(tiles))
        plan[0, split, : len(before)] = begins.repeat(tiles) + before
        plan[1, split, : len(before)] = np.minimum(most, sizes.repeat(tiles) - before)
    return plan if (plan[1] > 1).any() else None


def shared_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    tiles: Tensor,
    scale: float,
    window: int | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Tensor | None:
    """Attend as `ops.attention` with the same bits, by the tiles of `split_tiles`.

    Returns None if the splits' partial results are more than scratch_bytes.
    """
    (tokens, heads, width), kv_heads = q.shape, keys.shape[1]
    _, splits, sequences = tiles.shape
    if 4 * splits * tokens * heads * (width + 2) > scratch_bytes:
        return None
    # A split that a row does not see stays -inf.
    peaks = q.new_full((splits, tokens, heads), float("-inf"), dtype=torch.float32)
    totals = torch.empty_like(peaks)
    parts = q.new_empty(splits, tokens, heads, width, dtype=torch.float32)
    shape = {"WIDTH": width, "BLOCK_E": max(16, triton.next_power_of_2(width))}
    attend_split_kernel[sequences, kv_heads, splits](
        q,
        keys,
        values,
        parts,
        peaks,
        totals,
        rows.tables,
        rows.first,
        rows.start,
        tiles[0],
        tiles[1],
        tokens,
        rows.tables.stride(0),
        *q.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        scale * math.log2(math.e),
        (1 << 30) if window is None else window,
        GROUP=heads // kv_heads,
        PAGE=keys.shape[2],
        **shape,
        num_warps=4,
        num_stages=2,
    )
    merged = torch.empty_like(q, memory_format=torch.contiguous_format)
    merge_kernel[(tokens * heads,)](
        peaks, totals, parts, merged, None, splits, **shape, num_warps=1
    )
    return merged


@triton.jit(do_not_specialize=["rows", "table_stride", "window"])
def attend_split_kernel(
    q,
    keys,
    values,
    parts,
    peaks,
    totals,
    tables,
    first,
    start,
    tile_first,
    tile_count,
    rows,
    table_stride,
    q_token,
    q_head,
    k_page,
    k_head,
    k_token,
    v_page,
    v_head,
    v_token,
    scale,
    window,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Attend one split of one key/value head for the tokens of a tile's sequences."""
    kv_head, split = tl.program_id(1), tl.program_id(2)
    tile = split * tl.num_programs(0) + tl.program_id(0)
    leader, count = tl.load(tile_first + tile), tl.load(tile_count + tile)
    pair = tl.arange(0, BLOCK_Q)
    there, head = pair < count * GROUP, kv_head * GROUP + pair % GROUP
    position = tl.load(start + leader + pair // GROUP, mask=there, other=-1)
    end = tl.max(position, 0) + 1  # no pair of the tile sees further
    nearest = tl.min(tl.where(there, position, end), 0)
    begin = tl.maximum(0, nearest - window + 1)  # nor less far
    low = tl.maximum(split * SPLIT_KEYS, begin // BLOCK_KEYS * BLOCK_KEYS)
    high = tl.minimum((split + 1) * SPLIT_KEYS, end)
    if low >= high:
        return

    element = tl.arange(0, BLOCK_E)
    inside = there[:, None] & (element < WIDTH)
    row = tl.load(first + leader + pair // GROUP, mask=there, other=0).to(tl.int64)
    query = tl.load(q + (row * q_token + head * q_head)[:, None] + element, mask=inside, other=0.0)
    none, zero = tl.full([BLOCK_Q], float("-inf"), tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    nothing = tl.zeros([BLOCK_Q, BLOCK_E], tl.float32)
    peak, total, acc = none, zero, nothing
    for base in range(low, high, BLOCK_KEYS):
        key = base + tl.arange(0, BLOCK_KEYS)
        page = tl.load(tables + leader.to(tl.int64) * table_stride + base // PAGE).to(tl.int64)
        place, seen = (key % PAGE).to(tl.int64), (key < end)[:, None] & (element < WIDTH)
        k_at, v_at = page * k_page + kv_head * k_head, page * v_page + kv_head * v_head
        k = tl.load(keys + k_at + (place * k_token)[:, None] + element, mask=seen, other=0.0)
        v = tl.load(values + v_at + (place * v_token)[:, None] + element, mask=seen, other=0.0)
        visible = (key <= position[:, None]) & (key > position[:, None] - window)
        peak, total, acc = _see(query, k, v, visible, scale, peak, total, acc)
    peak, total, acc = _join(none, zero, nothing, peak, total, acc)

    at = (split.to(tl.int64) * rows + row) * tl.num_programs(1) * GROUP + head
    tl.store(peaks + at, peak, mask=there)
    tl.store(totals + at, total, mask=there)
    tl.store(parts + at[:, None] * WIDTH + element, acc, mask=inside)
