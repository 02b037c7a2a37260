"""Decode from shared pages over Triton: pages that several sequences share are read once, with the
bits that each has alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed")

from tandem.model.attention import Scoring
from tandem.model.paged_attention import PAGE, DecodeRows, Runs
from tandem.plugins.triton.attention import SPLIT_KEYS, attention
from tandem.plugins.triton.plans import TritonDecodePlan, TritonPagedPlan
from tandem.plugins.triton.shared_splits import split_tiles
from tests.support.kernels import BF16, DEVICE, FP32, random, same_bits

SPLIT, PAGES = SPLIT_KEYS.value, SPLIT_KEYS.value // PAGE


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
    tables, starts, pages = tables_of([(6, PAGES, 0), (1, 0, 600), (2, 2, 5), (3, PAGES + 1, 90)])
    count, heads = len(tables), group * kv_heads
    keys, values = (random(s, pages, kv_heads, PAGE, width, dtype=dtype) for s in (1, 2))
    k, v = (random(s, count, kv_heads, width, dtype=dtype) for s in (3, 4))
    q, scale = random(5, count, heads, width, dtype=dtype), width**-0.5
    plan = TritonPagedPlan([keys], [values], Runs(tables, starts, np.ones(count, np.int64)), heads)
    assert plan.tiles[1].max() == min(6, (64 if dtype == BF16 else 16) // group)
    assert plan.tiles[3].tolist() == [[512] * 6 + [0] + [256] * 2 + [512] * 3, [0] * 9 + [640] * 3]
    found = plan.attend(0, q, k, v, Scoring(scale, window))
    assert same_bits(found, attention(q, keys, values, plan.rows, Scoring(scale, window)))


def test_three_splits_of_which_two_are_shared():
    tables, starts, pages = tables_of([(3, 2 * PAGES, 20), (2, 2 * PAGES, 700)])
    keys, values = (random(s, pages, 1, PAGE, 16) for s in (1, 2))
    q, new = random(3, 5, 2, 16), random(4, 2, 5, 1, 16)
    plan = TritonPagedPlan([keys], [values], Runs(tables, starts, np.ones(5, np.int64)), 2)
    assert [row[row > 0].tolist() for row in plan.tiles[1]] == [[3, 2], [3, 2], [], []]
    found = plan.attend(0, q, *new, Scoring(0.25))
    assert same_bits(found, attention(q, keys, values, plan.rows, Scoring(0.25)))


def test_rows_of_static_tables_have_the_bits_of_the_plan_of_their_sequences():
    tables, starts, pages = tables_of([(3, 2, 20), (1, 0, 40), (2, 1, 60)])
    keys, values = (random(s, pages, 1, PAGE, 16) for s in (1, 2))
    q, new = random(3, 6, 2, 16), random(4, 2, 6, 1, 16)
    plain = TritonPagedPlan([keys], [values], Runs(tables, starts, np.ones(6, np.int64)), 2)
    expected = plain.attend(0, q, *new, Scoring(0.25, 300))
    buffers = torch.zeros(4, 9, 11, dtype=torch.int32, device=DEVICE)  # of more splits and rows
    buffers[:, : plain.tiles.shape[1], :6] = plain.tiles
    rows = DecodeRows(
        tables=F.pad(plain.rows.tables, (0, 5, 0, 2)),
        counts=F.pad(plain.rows.count, (0, 2)),
        positions=F.pad(plain.rows.start, (0, 2)).long(),
        max_length=1024,
        tiles=buffers[:, :2, :8],
    )
    found = TritonDecodePlan([keys], [values], rows).attend(
        0, F.pad(q, (0, 0, 0, 0, 0, 2)), *F.pad(new, (0, 0, 0, 0, 0, 2)), Scoring(0.25, 300)
    )
    assert same_bits(found[:6], expected) and not found[6:].any()


def test_a_split_is_shared_as_far_as_neighbours_have_its_pages():
    tables, starts, _ = tables_of([(6, PAGES, 0), (2, PAGES - 1, 200)])
    first, count, end, own = split_tiles(
        Runs(tables, starts, np.ones(8, np.int64)).table, starts, PAGE, 4
    )
    assert count[0].tolist() == [4, 2, 2, 0, 0, 0, 0, 0] and not count[1].any()
    assert first[0, :3].tolist() == [0, 4, 6] and end[0, :3].tolist() == [512, 512, 384]
    assert own[0].tolist() == [512] * 6 + [384] * 2 and not own[1].any()


def test_of_nested_prefixes_the_longest_is_shared():
    table = np.array([[7, 1, 2, 10], [7, 1, 2, 11], [7, 3, 12, 0], [7, 4, 13, 0], [7, 4, 14, 0]])
    starts = np.array([400, 430, 260, 300, 257])
    _, count, end, own = split_tiles(table, starts, PAGE, 8)
    assert count[0].tolist() == [2, 2, 0, 0, 0] and end[0].tolist() == [384, 256, 0, 0, 0]
    assert own[0].tolist() == [384, 384, 0, 256, 256]
