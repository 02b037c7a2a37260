"""Exact attention over a paged key/value cache: decode tokens, chunks of prompts, or both at once.

A page is one key block of the exact scheme (`attention.KEY_BLOCK`), so the sum over a page is the
sum over a block, and a token's output has the bits of the trainer's packed pass. Sequences of
different lengths are attended page column by page column: each reads only the pages it has. Knows
no request and no schedule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.model.attention import (
    BUCKET_BYTES,
    KEY_BLOCK,
    QUERY_BLOCK,
    Queries,
    Scoring,
    heads_first,
    ladder,
    picked,
    query_key,
    rows_first,
    weigh,
)
from tandem.model.config_file import conv_layers, head_size, kv_heads_of
from tandem.model.page_columns import Column, column_of

PAGE = KEY_BLOCK


@dataclass(kw_only=True)
class Bucket(Queries):
    """n runs of R query rows, each of another sequence, those with more pages first."""

    # int64 [n * R], padding repeats a run's last row; None: every row of the pass, in order
    rows: Tensor | None
    kept: Tensor | None  # int64, places of the n * R that are not padding; None: all
    columns: list[Column]


class Runs:
    """The new tokens of each sequence in a pass, in consecutive rows.

    Sequence s has counts[s] new tokens from position starts[s]. tables[s] lists its pages in order,
    with room for the new tokens. Derived: table int64 [S, M]; firsts int64 [S], each sequence's
    first row; positions, pages and offsets int64 [T], where each row's key goes.
    """

    def __init__(self, tables: Any, starts: np.ndarray, counts: np.ndarray):
        self.table = tables if isinstance(tables, np.ndarray) else padded_tables(tables)
        self.starts, self.counts = starts, counts
        self.firsts = np.cumsum(counts) - counts
        self.positions = np.arange(counts.sum()) + (starts - self.firsts).repeat(counts)
        self.pages = self.table[np.arange(len(counts)).repeat(counts), self.positions // PAGE]
        self.offsets = self.positions % PAGE

    def slots(self, lag: int) -> np.ndarray:
        """Find where the token `lag` before each one is, int64 [T]: a page's number times PAGE and
        its place there; -1 for none."""
        at, sequences = self.positions - lag, np.arange(len(self.counts)).repeat(self.counts)
        pages = self.table[sequences, np.maximum(at, 0) // PAGE]
        return np.where(at >= 0, pages * PAGE + at % PAGE, -1)


def padded_tables(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """Make page tables of one width, int64 [S, M]."""
    width = max(map(len, tables), default=0)
    return np.array([[*table, *[0] * (width - len(table))] for table in tables], np.int64)


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
    tiles: Tensor | None = None  # int32, what the rows read together: Kernels.shared_tiles

    def slots(self) -> Tensor:
        """Compute where each key goes, int64 [B]: page * PAGE + offset, or -1 for padding."""
        pages = self.tables.gather(1, (self.positions // PAGE)[:, None])[:, 0].long()
        return torch.where(self.counts > 0, pages * PAGE + self.positions % PAGE, -1)

    def runs(self) -> Runs:
        """Read the live rows back into the form that the CPU's plan takes."""
        live = int(self.counts.sum())
        starts = self.positions[:live].numpy().copy()
        return Runs(self.tables[:live].long().numpy(), starts, np.ones(live, np.int64))


class PagedPlan:
    """Plan that writes the new tokens' keys and values into their pages, then attends.

    keys and values: per layer [pages, K, PAGE, E], as `page_tensors`; heads: query heads.
    Arithmetic is float32.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], runs: Runs, heads: int):
        self.keys, self.values, self._runs = keys, values, runs
        kv_heads = next(k.shape[1] for k, v in zip(keys, values, strict=True) if len(v))
        head = runs.pages[:, None] * kv_heads + np.arange(kv_heads)  # [T, K]
        self._rows = torch.from_numpy((head * PAGE + runs.offsets[:, None]).reshape(-1))
        self.new = len(runs.pages)
        self._slots: list[Tensor] = []  # `Runs.slots` for a lag of 0, 1 and so on
        self.buckets = _buckets(runs, heads, kv_heads)

    def earlier(self, layer: int, x: Tensor, count: int) -> list[Tensor]:
        """Write the rows' own x, then look up rows as general_parts.History."""
        for lag in range(len(self._slots), count + 1):
            self._slots.append(torch.from_numpy(self._runs.slots(lag)))
        held, padding = self.keys[layer].view(-1, x.shape[1]), (0, 0, 0, len(x) - self.new)
        held.index_copy_(0, self._slots[0], x[: self.new])
        return [F.pad(picked(held, slots), padding) for slots in self._slots[1 : count + 1]]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        keys, values, new = self.keys[layer], self.values[layer], self.new
        for cache, written in ((keys, k), (values, v)):
            cache.view(-1, cache.shape[-1]).index_copy_(
                0, self._rows, written[:new].reshape(-1, cache.shape[-1])
            )
        if self.buckets[0].rows is None:
            out = _attend(self.buckets[0], q[:new], keys, values, scoring).to(q.dtype)
            return out if new == len(q) else F.pad(out, (0, 0, 0, 0, 0, len(q) - new))
        out = torch.zeros_like(q)  # rows beyond the sequences' are padding
        for bucket in self.buckets:
            rows = bucket.rows
            assert rows is not None
            part = _attend(bucket, q.index_select(0, rows), keys, values, scoring)
            if bucket.kept is not None:
                part, rows = part.index_select(0, bucket.kept), rows.index_select(0, bucket.kept)
            out.index_copy_(0, rows, part.to(q.dtype))
        return out


def page_tensors(
    config: Any, count: int, zeros: Callable[[tuple[int, ...]], Tensor]
) -> tuple[list[Tensor], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Make what `count` pages of a model hold, by its text config of transformers.

    Returns (tensors [sides, layers, pages, heads, PAGE, size], keys and values of each layer, which
    are views of them). A short convolution has its inputs, [pages, 1, PAGE, D], for keys, and no
    values.
    """
    convs, size = conv_layers(config), head_size(config)
    layers = config.num_hidden_layers - len(convs)
    slab = zeros((2, layers, count, kv_heads_of(config), PAGE, size))
    keys, values = (list(side.unbind()) for side in slab)
    if not convs:
        return [slab], tuple(keys), tuple(values)
    inputs = zeros((1, len(convs), count, 1, PAGE, config.hidden_size))
    for number, own in zip(convs, inputs[0], strict=True):
        keys.insert(number, own)
        values.insert(number, own[:0])
    return [slab, inputs], tuple(keys), tuple(values)


def page_numbers(config: Any) -> int:
    """Count the numbers that a page of a model holds (text config of transformers)."""
    convs = len(conv_layers(config))
    attended = 2 * (config.num_hidden_layers - convs) * kv_heads_of(config) * head_size(config)
    return PAGE * int(attended + convs * config.hidden_size)


def _attend(bucket: Bucket, q: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    """Attend the bucket's queries [n * R, H, E] over the cache, to [n * R, H, E]."""
    n, run = bucket.positions.shape
    heads, kv_heads = q.shape[1], keys.shape[1]
    query = heads_first(q.float(), run, kv_heads)
    rows = query.shape[2]
    if rows % 4:
        query = F.pad(query, (0, 0, 0, -rows % 4))
    first, *others = bucket.columns
    if others:
        scores = query.new_empty(*query.shape[:3], bucket.num_keys)
        for at, column in enumerate(bucket.columns):
            part = slice(at * PAGE, at * PAGE + column.used)
            scores[: column.sequences, :, :, part] = column.multiply(query_key, query, keys)
    else:
        scores = first.multiply(query_key, query, keys)
    split = scores.view(n, kv_heads, run, -1, scores.shape[-1])
    probs = weigh(split, bucket.mask(scoring.window), scoring).view(scores.shape)
    out = first.multiply(torch.matmul, probs[..., :PAGE], values)
    for at, column in enumerate(others, 1):
        part = slice(at * PAGE, at * PAGE + column.used)
        out[: column.sequences] += column.multiply(torch.matmul, probs[..., part], values)
    return rows_first(out[:, :, :rows], run, heads)


def _buckets(all_runs: Runs, heads: int, kv_heads: int) -> list[Bucket]:
    """Group runs of at most QUERY_BLOCK queries by padded size, with scores within BUCKET_BYTES."""
    starts, counts, firsts = all_runs.starts, all_runs.counts, all_runs.firsts
    blocks = -(-counts // QUERY_BLOCK)
    owner = np.arange(len(counts)).repeat(blocks)
    offset = (np.arange(blocks.sum()) - (np.cumsum(blocks) - blocks).repeat(blocks)) * QUERY_BLOCK
    count = np.minimum(QUERY_BLOCK, counts[owner] - offset)
    runs = np.stack([firsts[owner] + offset, starts[owner] + offset, count, owner], 1)
    padded = np.array([1 if c == 1 else ladder(c, 4) for c in count.tolist()])
    buckets = []
    for size in np.unique(padded).tolist():
        tile_rows = size * (heads // kv_heads) + -size * (heads // kv_heads) % 4
        members = runs[padded == size]
        pages = -(-(members[:, 1] + members[:, 2]) // PAGE)
        members = members[np.argsort(-pages, kind="stable")]
        while len(members):
            longest = int(members[0, 1] + members[0, 2]) + PAGE
            limit = max(1, BUCKET_BYTES // (4 * heads * size * longest))
            buckets.append(_bucket(size, members[:limit], all_runs.table, tile_rows))
            members = members[limit:]
    [first, *others] = buckets
    assert first.rows is not None
    if not others and torch.equal(first.rows, torch.arange(counts.sum())):
        first.rows = None  # one token of each sequence, those with more pages first
    return buckets


def _bucket(size: int, runs: np.ndarray, table: np.ndarray, tile_rows: int) -> Bucket:
    """Make a bucket of runs int64 [n, 4]: first row, its position, rows, sequence.

    Runs with more pages come first. tile_rows: padded rows of a run and key/value head.
    """
    first, start, count, owner = runs.T
    step = np.minimum(np.arange(size)[None], count[:, None] - 1)
    lengths = start + count
    longest = int(lengths.max())
    columns = []
    for at in range(0, longest, PAGE):
        m = int((lengths > at).sum())
        used = min(PAGE, ladder(longest - at, 16))
        columns.append(column_of(table[owner[:m], at // PAGE], used, tile_rows))
    padding = count.min() < size
    return Bucket(
        rows=torch.from_numpy((first[:, None] + step).reshape(-1)),
        kept=torch.from_numpy(np.flatnonzero(np.arange(size)[None] < count[:, None]))
        if padding
        else None,
        positions=torch.from_numpy(start[:, None] + step),
        num_keys=sum(column.used for column in columns),
        columns=columns,
    )
