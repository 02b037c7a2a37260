"""Pages that several sequences share are read once, and no bit of attention changes by it."""

import numpy as np
import pytest
import torch

from tandem.model.attention import Scoring
from tandem.model.page_columns import column_of
from tandem.model.paged_attention import PAGE, PagedPlan, Runs

HEADS = [(1, 2, 16), (3, 3, 64), (7, 1, 48), (4, 2, 128), (8, 1, 80)]  # group, kv heads, size


class Case:
    """Random groups of sequences with the beginning in common: their tables, and what runs."""

    def __init__(self, seed, heads, *, groups, decode, ordered=True):
        self.rng, self.free = np.random.default_rng(seed), iter(range(10_000))
        group, kv_heads, size = heads
        sequences = []
        for _ in range(groups):
            shared = [next(self.free) for _ in range(int(self.rng.integers(0, 4)))]
            for _ in range(int(self.rng.choice([1, 2, 3, 5, 8, 13]))):
                sequences.append(self.sequence(shared, decode))
        if ordered:
            sequences.sort(key=lambda one: (-len(one[0]), one[0]))
        self.tables, starts, counts = zip(*sequences, strict=True)
        self.starts, self.counts = np.array(starts), np.array(counts)
        noise = torch.Generator().manual_seed(seed)
        rows, pages = int(self.counts.sum()), next(self.free)
        self.cache = torch.randn(2, pages, kv_heads, PAGE, size, generator=noise)
        self.q = torch.randn(rows, group * kv_heads, size, generator=noise)
        self.new = torch.randn(2, rows, kv_heads, size, generator=noise)

    def sequence(self, shared, decode):
        """(table, start, count): new tokens behind the shared pages, in pages of its own."""
        before = len(shared) * PAGE + int(self.rng.integers(0, 200))
        count = 1 if decode else int(self.rng.choice([1, 1, 2, 6, 40, 130]))
        pages = -(-(before + count) // PAGE) - len(shared)
        return [*shared, *(next(self.free) for _ in range(pages))], before, count

    def attend(self, *, copied, window):
        """(output, widths of the tiles); copied: no two sequences share a page."""
        cache, tables = self.cache, self.tables
        if copied:
            order = [page for table in tables for page in table]
            cache, ends = cache[:, order], np.cumsum([len(table) for table in tables])
            tables = [list(range(e - len(t), e)) for t, e in zip(tables, ends, strict=True)]
        keys, values = cache.clone().unbind()
        plan = PagedPlan([keys], [values], Runs(tables, self.starts, self.counts), self.q.shape[1])
        out = plan.attend(0, self.q, *self.new, Scoring(self.q.shape[-1] ** -0.5, window))
        return out, [column.width for bucket in plan.buckets for column in bucket.columns]


def assert_same_bits(case, window=None):
    shared, widths = case.attend(copied=False, window=window)
    copied, single = case.attend(copied=True, window=window)
    assert set(single) == {1} and torch.equal(shared, copied)
    return max(widths)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 40, 150])
def test_decode_from_shared_pages_has_the_bits_of_decode_from_copies(heads, window):
    widths = [
        assert_same_bits(Case(seed, heads, groups=groups, decode=True), window)
        for seed, groups in enumerate((1, 2, 3, 5, 8, 11))
    ]
    assert max(widths) > 4


@pytest.mark.parametrize("heads", HEADS[:3], ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_chunks_beside_decode_from_shared_pages_have_the_bits_of_copies(heads, window):
    widths = [
        assert_same_bits(Case(seed, heads, groups=6, decode=False), window) for seed in range(6)
    ]
    assert max(widths) > 1


def test_order_of_the_sequences_changes_no_bit():
    for seed in range(4):
        case = Case(seed, HEADS[1], groups=6, decode=True)
        out, _ = case.attend(copied=False, window=None)
        mixed = case.rng.permutation(len(case.tables))
        case.tables = [case.tables[n] for n in mixed]
        case.starts, case.q, case.new = case.starts[mixed], case.q[mixed], case.new[:, mixed]
        again, _ = case.attend(copied=False, window=None)
        assert torch.equal(again, out[mixed])


@pytest.mark.parametrize("sharers", [2, 3, 7, 64])
def test_a_page_shared_in_the_first_column_only(sharers):
    case = Case(0, HEADS[1], groups=1, decode=True)
    case.tables = [[0, 1 + n] for n in range(sharers)]
    case.starts, case.counts = PAGE + np.arange(sharers), np.ones(sharers, np.int64)
    case.cache, case.q = torch.randn(2, 1 + sharers, 3, PAGE, 64), torch.randn(sharers, 9, 64)
    case.new = torch.randn(2, sharers, 3, 64)
    assert assert_same_bits(case) == sharers


def test_pages_of_their_own_are_read_as_before():
    gathered, consecutive = (column_of(np.array(pages), 128, 4) for pages in ([4, 9, 2], [6, 7, 8]))
    assert gathered.width == consecutive.width == 1
    assert gathered.pages.tolist() == [4, 9, 2] and consecutive.pages == slice(6, 9)


def test_tile_has_no_more_rows_than_a_block_of_queries():
    column = column_of(np.zeros(200, np.int64), 128, 12)
    assert column.width == 256 // 12 and len(column.pages) == -(-200 // 21)
