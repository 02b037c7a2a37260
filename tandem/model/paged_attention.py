"""Exact attention over a paged key/value cache: decode tokens, chunks of prompts, or both at once.

A page is one key block of the exact scheme (`attention.KEY_BLOCK`). Keys and values are read from
their pages into the buckets of a packed pass, so a token's output has the bits of the trainer's.
Knows no request and no schedule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.model.attention import KEY_BLOCK, Bucket, Scoring, attend, buckets_of, picked
from tandem.model.config_file import conv_layers, head_size, kv_heads_of

PAGE = KEY_BLOCK


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
    padded = [[*table, *[0] * (width - len(table))] for table in tables]
    return np.array(padded, np.int64).reshape(len(tables), width)


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
        kv_heads, size = next(k.shape[1::2] for k, v in zip(keys, values, strict=True) if len(v))
        each, last = np.arange(kv_heads), runs.table.shape[1] - 1
        head = runs.pages[:, None] * kv_heads + each  # [T, K]
        self._rows = torch.from_numpy((head * PAGE + runs.offsets[:, None]).reshape(-1))
        self.new = len(runs.pages)
        self._slots: list[Tensor] = []  # `Runs.slots` for a lag of 0, 1 and so on

        def rows_of(sequences: np.ndarray, key: np.ndarray) -> np.ndarray:  # [n, K, L]
            pages = runs.table[sequences[:, None], np.minimum(key // PAGE, last)]
            return (pages[:, None] * kv_heads + each[:, None]) * PAGE + key % PAGE

        self.buckets = buckets_of(
            *(runs.firsts, runs.starts, runs.counts, rows_of, heads),
            copied=2 * kv_heads * size,
            single=1,
        )

    def earlier(self, layer: int, x: Tensor, count: int) -> list[Tensor]:
        """Write the rows' own x, then look up rows as PackedPlan.earlier."""
        for lag in range(len(self._slots), count + 1):
            self._slots.append(torch.from_numpy(self._runs.slots(lag)))
        held, padding = self.keys[layer].view(-1, x.shape[1]), (0, 0, 0, len(x) - self.new)
        held.index_copy_(0, self._slots[0], x[: self.new])
        return [F.pad(picked(held, slots), padding) for slots in self._slots[1 : count + 1]]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        held, size = (self.keys[layer], self.values[layer]), q.shape[2]
        for cache, written in zip(held, (k, v), strict=True):
            cache.view(-1, size).index_copy_(0, self._rows, written[: self.new].reshape(-1, size))

        def read(bucket: Bucket) -> tuple[Tensor, Tensor]:
            n, heads, length = bucket.keys.shape
            blocks = bucket.keys[..., ::PAGE].reshape(-1) // PAGE  # a head of a page each
            keys, values = (cache.view(-1, PAGE * size).index_select(0, blocks) for cache in held)
            keys, values = (
                t.view(n, heads, -1, size)[:, :, :length].float() for t in (keys, values)
            )
            return keys, values

        return attend(q, self.buckets, scoring, read)


def page_tensors(
    config: Any, count: int, zeros: Callable[[tuple[int, ...]], Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Make what `count` pages of a model hold, by its text config of transformers.

    Returns keys and values of each layer, [pages, heads, PAGE, size]. A short convolution has its
    inputs, [pages, 1, PAGE, D], for keys, and no values.
    """
    convs, size = conv_layers(config), head_size(config)
    layers = config.num_hidden_layers - len(convs)
    slab = zeros((2, layers, count, kv_heads_of(config), PAGE, size))
    keys, values = (list(side.unbind()) for side in slab)
    if convs:
        inputs = zeros((len(convs), count, 1, PAGE, config.hidden_size))
        for number, own in zip(convs, inputs, strict=True):
            keys.insert(number, own)
            values.insert(number, own[:0])
    return tuple(keys), tuple(values)


def page_numbers(config: Any) -> int:
    """Count the numbers that a page of a model holds (text config of transformers)."""
    convs = len(conv_layers(config))
    attended = 2 * (config.num_hidden_layers - convs) * kv_heads_of(config) * head_size(config)
    return PAGE * int(attended + convs * config.hidden_size)
