"""Exact attention over a paged key/value cache: one token of many sequences, chunks of prompts, or both in one pass.

A page is one key block of the exact scheme (`attention.KEY_BLOCK`), so that the sum over a page is the sum over a block
and a token's output has the bits of the trainer's packed pass. Sequences of ragged lengths are attended page column by
page column: each reads the pages it has and no more. Knows no request and no schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.model.attention import BUCKET_BYTES, KEY_BLOCK, QUERY_BLOCK, heads_first, ladder, rows_first, weigh

PAGE = KEY_BLOCK


@dataclass(kw_only=True)
class Bucket:
    """Runs of R query rows of several sequences, those with more pages first."""

    rows: Tensor  # int64 [n, R]; padding repeats a run's last row
    kept: Tensor | None  # int64, which of the n * R are no padding; None: all
    positions: Tensor  # int64 [n, R]
    columns: list[tuple[Tensor, int]]  # for each page column: pages int64 [m] of the first m sequences, keys used
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """bool [n, 1, R, 1, L], true where a key is hidden; made once for all layers."""
        if window not in self.masks:
            key, position = torch.arange(sum(used for _, used in self.columns)), self.positions[:, :, None]
            hidden = key > position
            if window is not None:
                hidden |= key <= position - window
            self.masks[window] = hidden[:, None, :, None]
        return self.masks[window]


class PagedPlan:
    """Writes the new tokens' keys and values into their pages, then attends.

    keys: per layer [pages, K, E, PAGE]; values: per layer [pages, K, PAGE, E]. Of sequence s, tables[s] are the pages in
    order with room for the new tokens, starts[s] is the position of its first new token and counts[s] how many it has;
    their rows follow each other. After it is made, `pages` and `offsets` int64 [T] say where each row's token is kept.
    """

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], tables: Sequence[Sequence[int]], starts: np.ndarray,
        counts: np.ndarray, heads: int,
    ):  # fmt: skip
        self.keys, self.values = keys, values
        table = _rectangle(tables)
        firsts = np.cumsum(counts) - counts
        self.positions = np.arange(counts.sum()) + (starts - firsts).repeat(counts)
        self.pages = table[np.arange(len(counts)).repeat(counts), self.positions // PAGE]
        self.offsets = self.positions % PAGE
        self._page, self._offset = torch.from_numpy(self.pages), torch.from_numpy(self.offsets)
        self.buckets = _buckets(table, starts, counts, firsts, heads)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values, new = self.keys[layer], self.values[layer], len(self.pages)
        keys[self._page, :, :, self._offset] = k[:new]
        values[self._page, :, self._offset] = v[:new]
        out = torch.zeros(q.shape)  # rows beyond the sequences' are padding
        for bucket in self.buckets:
            part, rows = _attend(bucket, q, keys, values, scale, window), bucket.rows.view(-1)
            if bucket.kept is not None:
                part, rows = part.index_select(0, bucket.kept), rows.index_select(0, bucket.kept)
            out.index_copy_(0, rows, part)
        return out


def _rectangle(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """int64 [S, M], rows filled up with zeros."""
    lengths = np.array([len(table) for table in tables])
    out = np.zeros((len(tables), lengths.max()), np.int64)
    out[np.arange(out.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(tables), np.int64, lengths.sum())
    return out


def _attend(bucket: Bucket, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """[n * R, H, E]"""
    n, run = bucket.rows.shape
    heads, kv_heads = q.shape[1], keys.shape[1]
    query = heads_first(q, bucket.rows, kv_heads)
    rows = query.shape[2]
    query = F.pad(query, (0, 0, 0, -rows % 4))
    columns = [(page, used, at * PAGE) for at, (page, used) in enumerate(bucket.columns)]
    scores = query.new_empty(*query.shape[:3], columns[-1][2] + columns[-1][1])
    for page, used, at in columns:
        scores[: len(page), :, :, at : at + used] = query[: len(page)] @ keys.index_select(0, page)[..., :used]
    probs = weigh(scores.view(n, kv_heads, run, -1, scores.shape[-1]), bucket.mask(window), scale).view(scores.shape)
    out = probs[..., :PAGE] @ values.index_select(0, columns[0][0])[:, :, : columns[0][1]]
    for page, used, at in columns[1:]:
        out[: len(page)] += probs[: len(page), :, :, at : at + used] @ values.index_select(0, page)[:, :, :used]
    return rows_first(out[:, :, :rows], run, heads)


def _buckets(table: np.ndarray, starts: np.ndarray, counts: np.ndarray, firsts: np.ndarray, heads: int) -> list[Bucket]:
    """Runs of at most QUERY_BLOCK queries, by padded size; a bucket's scores stay within BUCKET_BYTES."""
    blocks = -(-counts // QUERY_BLOCK)
    owner = np.arange(len(counts)).repeat(blocks)
    offset = (np.arange(blocks.sum()) - (np.cumsum(blocks) - blocks).repeat(blocks)) * QUERY_BLOCK
    count = np.minimum(QUERY_BLOCK, counts[owner] - offset)
    runs = np.stack([firsts[owner] + offset, starts[owner] + offset, count, owner], 1)
    padded = np.array([1 if c == 1 else ladder(c, 4) for c in count.tolist()])
    buckets = []
    for size in np.unique(padded).tolist():
        members = runs[padded == size]
        members = members[np.argsort(-(members[:, 1] + members[:, 2]), kind="stable")]
        while len(members):
            pages = -(-int(members[0, 1] + members[0, 2]) // PAGE)
            limit = max(1, BUCKET_BYTES // (4 * heads * size * pages * PAGE))
            buckets.append(_bucket(size, members[:limit], table))
            members = members[limit:]
    return buckets


def _bucket(size: int, runs: np.ndarray, table: np.ndarray) -> Bucket:
    """runs int64 [n, 4]: first row, its position, rows, sequence; longest sequences first."""
    first, start, count, owner = runs.T
    step = np.minimum(np.arange(size)[None], count[:, None] - 1)
    lengths = start + count
    columns = []
    for at in range(0, int(lengths[0]), PAGE):
        holders = owner[: int((lengths > at).sum())]
        used = PAGE if lengths[0] - at >= PAGE else min(PAGE, ladder(int(lengths[0]) - at, 16))
        columns.append((torch.from_numpy(table[holders, at // PAGE]), used))
    padding = count.min() < size
    return Bucket(
        rows=torch.from_numpy(first[:, None] + step),
        kept=torch.from_numpy(np.flatnonzero(np.arange(size)[None] < count[:, None])) if padding else None,
        positions=torch.from_numpy(start[:, None] + step),
        columns=columns,
    )
