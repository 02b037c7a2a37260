"""Decode from shared pages in Triton: pages that neighbours have in common are read once.

Of the 64 (token, query head) pairs in a tile of `attend_kernel`, decode fills those of one token.
Here a split of 512 keys is read in two launches. In the first a tile holds the tokens of several
sequences and reads the pages at the split's start that all have in common. In the second each
sequence goes on alone from the sums that it has so far. Blocks, splits and the order of sums are
those of `attend_kernel`, and so are the bits.
"""

import numpy as np
import torch
import triton
from torch import Tensor

from tandem.model.attention import Scoring
from tandem.plugins.triton.attention import (
    SCRATCH_BYTES,
    SPLIT_KEYS,
    PagedRows,
    attend_split_kernel,
    merge_kernel,
    scale_and_window,
    tile_options,
)


def split_tiles(tables: np.ndarray, starts: np.ndarray, page: int, most: int) -> np.ndarray | None:
    """Plan int32 [4, splits, S]: for each tile of a split its first sequence, their number and the
    key where the pages that they share end; and for each sequence where its tile ends, or 0.

    Every sequence decodes one token, and a number of 0 is no tile. tables int64 [S, M], starts
    int64 [S], page: tokens of a page, most: sequences of a tile. It stays right while sequences
    grow within their pages. None if no two sequences would share a tile.
    """
    sequences = len(starts)
    splits, pages = triton.cdiv(int(starts.max()) + 1, SPLIT_KEYS.value), SPLIT_KEYS.value // page
    plan = np.zeros((4, splits, sequences), np.int32)
    # pages that a sequence does not use equal no other's
    used = starts[:, None] >= page * np.arange(tables.shape[1])
    tables = np.where(used, tables, -1 - np.arange(sequences)[:, None])
    for split in range(splits if most > 1 else 0):
        own = tables[:, split * pages : (split + 1) * pages]
        common = (own[1:] == own[:-1]).cumprod(1).sum(1)  # pages, of each two neighbours
        # of nested prefixes the longest is shared
        joined = (common > 0) & (common >= np.append(0, common[:-1]))
        joined &= common >= np.append(common[1:], 0)
        begins = np.flatnonzero(joined & ~np.append(False, joined[:-1]))
        members = np.append(joined, False) | np.append(False, joined)
        sizes = np.diff(np.flatnonzero(np.append(~joined, True)), prepend=-1)
        sizes = sizes[sizes > 1]
        ends = split * SPLIT_KEYS.value + page * common[begins]
        tiles = -(-sizes // most)
        before = most * (np.arange(tiles.sum()) - (np.cumsum(tiles) - tiles).repeat(tiles))
        plan[0, split, : len(before)] = begins.repeat(tiles) + before
        plan[1, split, : len(before)] = np.minimum(most, sizes.repeat(tiles) - before)
        plan[2, split, : len(before)] = ends.repeat(tiles)
        plan[3, split, members] = ends.repeat(sizes)
    return plan if plan[1].any() else None


def shared_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    tiles: Tensor,
    scoring: Scoring,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Tensor | None:
    """Attend as `attention.attention` with the same bits, by the tiles of `split_tiles`.

    tiles [4, splits, S] may have fewer sequences than rows, whose others are padding (count 0).
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
    for alone in (False, True):
        attend_split_kernel[sequences, kv_heads, splits](
            *(q, keys, values, parts, peaks, totals),
            *(rows.tables, rows.first, rows.count, rows.start, *tiles),
            *(tokens, rows.tables.stride(0), tiles.stride(1)),
            *(*q.stride()[:2], *keys.stride()[:3], *values.stride()[:3]),
            *scale_and_window(scoring),
            ALONE=alone,
            GROUP=heads // kv_heads,
            PAGE=keys.shape[2],
            **shape,
            **tile_options(q),
        )
    merged = torch.empty_like(q, memory_format=torch.contiguous_format)
    merge_kernel[(tokens * heads,)](
        peaks, totals, parts, merged, None, splits, **shape, num_warps=1
    )
    return merged
