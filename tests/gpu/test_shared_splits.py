"""Decode from shared pages over Triton: a split that several sequences share is read once, with the
bits that each has alone."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tandem.model.paged_attention import PAGE, Runs
from tandem.model.triton.attention_kernels import SPLIT_KEYS
from tandem.model.triton.ops import attention
from tandem.model.triton.plans import TritonPagedPlan
from tandem.model.triton.shared_splits import shared_attention, split_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16 = torch.float32, torch.bfloat16
SPLIT, PAGES = SPLIT_KEYS.value, SPLIT_KEYS.value // PAGE


def random(seed, *shape, dtype=FP32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def same_bits(a, b):
    bits = torch.int32 if a.dtype == FP32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


def tables_of(groups):
    """(tables, starts) of groups (sequences, shared pages, tokens of the first behind them)."""
    tables, starts, free = [], [], iter(range(1000))
    for sequences, shared, own in groups:
        common = [next(free) for _ in range(shared)]
        for number in range(sequences):
            start = shared * PAGE + own + 40 * number
            tables.append([*common, *(next(free) for _ in range(start // PAGE + 1 - shared))])
            starts.append(start)
    return tables, np.array(starts), next(free)


@pytest.mark.parametrize(
    ("group", "kv_heads", "width", "window", "dtype"),
    [(3, 1, 20, None, FP32), (1, 2, 16, 130, BF16), (8, 1, 16, 4, BF16)],
)
def test_tokens_of_a_shared_split_have_the_bits_they_have_alone(
    group, kv_heads, width, window, dtype
):
    tables, starts, pages = tables_of([(6, PAGES, 0), (1, 0, 600), (2, 2, 5)])
    count, heads = len(tables), group * kv_heads
    keys, values = (random(s, pages, kv_heads, PAGE, width, dtype=dtype) for s in (1, 2))
    k, v = (random(s, count, kv_heads, width, dtype=dtype) for s in (3, 4))
    q, scale = random(5, count, heads, width, dtype=dtype), width**-0.5
    runs = Runs(tables, starts, np.ones(count, np.int64))
    plan = TritonPagedPlan([keys], [values], runs, heads)
    assert plan.tiles[1].max() == min(6, 16 // group)
    found = plan.attend(0, q, k, v, scale, window)
    assert same_bits(found, attention(q, keys, values, plan.rows, scale, window))


def test_three_splits_of_which_two_are_shared():
    tables, starts, pages = tables_of([(3, 2 * PAGES, 20), (2, 2 * PAGES, 700)])
    keys, values = (random(s, pages, 1, PAGE, 16) for s in (1, 2))
    q, new = random(3, 5, 2, 16), random(4, 2, 5, 1, 16)
    plan = TritonPagedPlan([keys], [values], Runs(tables, starts, np.ones(5, np.int64)), 2)
    assert [row[row > 0].tolist() for row in plan.tiles[1]] == [[3, 2], [3, 2], [1] * 5, [1] * 5]
    found = plan.attend(0, q, *new, 0.25, None)
    assert same_bits(found, attention(q, keys, values, plan.rows, 0.25, None))


def test_tiles_are_of_neighbours_that_share_a_whole_split():
    tables, starts, _ = tables_of([(6, PAGES, 0), (2, PAGES - 1, 200)])
    first, count = split_tiles(Runs(tables, starts, np.ones(8, np.int64)).table, starts, PAGE, 4)
    assert count[0].tolist() == [4, 2, 1, 1, 0, 0, 0, 0]
    assert first[0, :4].tolist() == [0, 4, 6, 7]
    assert count[1].tolist() == [1] * 8 and first[1].tolist() == [*range(8)]


@pytest.mark.parametrize("groups", [[(1, 0, 900)] * 3, [(5, 3, 0)], [(2, 3, 127)]])
def test_where_no_whole_split_is_shared_there_are_no_tiles(groups):
    tables, starts, _ = tables_of(groups)
    table = Runs(tables, starts, np.ones(len(tables), np.int64)).table
    assert split_tiles(table, starts, PAGE, 3) is None


@pytest.mark.parametrize("group", [9, 16, 17])
def test_a_group_that_fills_a_tile_alone_shares_none(group):
    tables, starts, _ = tables_of([(4, PAGES, 0)])
    table = Runs(tables, starts, np.ones(4, np.int64)).table
    assert split_tiles(table, starts, PAGE, group) is None


def test_chunks_of_prompts_take_the_other_kernel():
    tables, starts, pages = tables_of([(3, PAGES, 0)])
    keys, values = (torch.zeros(pages, 1, PAGE, 16, device=DEVICE) for _ in range(2))
    plan = TritonPagedPlan([keys], [values], Runs(tables, starts, np.array([1, 1, 2])), 2)
    assert plan.tiles is None


def test_partial_results_stay_within_their_bound():
    tables, starts, pages = tables_of([(2, PAGES, 0)])
    cache, q = torch.zeros(pages, 1, PAGE, 16, device=DEVICE), random(1, 2, 2, 16)
    plan = TritonPagedPlan([cache], [cache], Runs(tables, starts, np.ones(2, np.int64)), 2)
    needed = 4 * 2 * 2 * 2 * (16 + 2)  # bytes, splits, tokens, heads, numbers
    arguments = q, cache, cache, plan.rows, plan.tiles, 0.25
    assert shared_attention(*arguments, scratch_bytes=needed - 1) is None
    assert shared_attention(*arguments, scratch_bytes=needed) is not None
