"""The GPU kernels against float64, and their promise: a row's bits do not depend on what is
computed beside it.

Runs unchanged on a GPU. Without one Triton's interpreter executes the same programs in NumPy: that
proves indices, masks and the order of sums, not what a compiler makes of them.
"""

from functools import cache

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tandem.model.attention import Scoring
from tandem.plugins.triton.attention import PagedRows, attention, segment_attention, write_cache
from tandem.plugins.triton.matmul import matmul
from tests.support.kernels import BF16, DEVICE, FP16, FP32, assert_near, int32, random, same_bits

PAGE = 128


def in_float64(q, k, v, scale, window):
    """The last len(q) tokens of a sequence, q [n, H, E] over k and v [start + n, K, E] -> float64
    [n, H, E]."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    key = torch.arange(len(k), device=DEVICE)
    position = (len(k) - len(q) + torch.arange(len(q), device=DEVICE))[:, None]
    hidden = (key > position) | (key <= position - (window or len(k)))
    scores = torch.einsum("qhe,khe->hqk", q, k) * scale
    return torch.einsum("hqk,khe->qhe", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def pages_of(sequences, tables, pages, page=PAGE):
    """The cache that holds each sequence's (k, v) [n, K, E] in its pages; NaN wherever nothing was
    written."""
    _, kv_heads, width = sequences[0][0].shape
    both = torch.full(
        (2, pages, kv_heads, page, width), float("nan"), dtype=sequences[0][0].dtype, device=DEVICE
    )
    for rows, table in zip(sequences, tables, strict=True):
        for side, t in zip(both, rows, strict=True):
            for number, part in zip(table, t.split(page), strict=False):
                side[number, :, : len(part)] = part.transpose(0, 1)
    return both[0], both[1]


# A sequence that crosses the boundary between two splits (512), seen from the tokens around it.
LENGTH, FROM, HEADS, KV_HEADS, WIDTH, SCALE = 520, 506, 3, 1, 64, 0.125
TABLE = (3, 0, 4, 1, 6)
# 4: a row of a tile sees nothing in the tile's first block
WINDOWS = pytest.mark.parametrize("window", [None, 4])


@cache
def sequence(dtype=BF16):
    return tuple(
        random(s, LENGTH, h, WIDTH, dtype=dtype)
        for s, h in ((1, HEADS), (2, KV_HEADS), (3, KV_HEADS))
    )


@cache
def packed_pass(window, dtype):
    """Compute as a trainer does: the whole sequence in one pass, one program walking all splits of
    a tile."""
    q, k, v = sequence(dtype)
    segments = int32((0, LENGTH, 0, 0))
    return segment_attention(q, k, v, segments, Scoring(SCALE, window), scratch_bytes=0)


def new_tokens(
    start, stop, *, table=TABLE, max_length=1024, window=None, pages=None, dtype=BF16, **options
):
    """The sequence's tokens start .. stop computed over its pages, as a chunk of prefill or, if
    one, in decode."""
    q, k, v = sequence(dtype)
    rows = PagedRows(
        tables=int32(table),
        first=int32(0),
        count=int32(stop - start),
        start=int32(start),
        max_length=max_length,
        alone=stop - start == 1,
    )
    keys, values = pages or pages_of([(k[:stop], v[:stop])], [table], 7)
    return attention(q[start:stop], keys, values, rows, Scoring(SCALE, window), **options)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_matmul_is_near_float64_for_sizes_that_fill_no_tile(dtype, bias):
    x, weight = random(1, 37, 100, dtype=dtype), random(2, 70, 100, dtype=dtype)
    b = random(3, 70, dtype=dtype) if bias else None
    expected = x.double() @ weight.double().t() + (b.double() if bias else 0.0)
    assert_near(matmul(x, weight, b) / 10, expected / 10, dtype)  # outputs are sums of 100 products


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_row_of_matmul_has_the_same_bits_alone_and_in_any_batch(dtype):
    x, weight, bias = (
        random(1, 150, 330, dtype=dtype),
        random(2, 70, 330, dtype=dtype),
        random(3, 70, dtype=dtype),
    )
    whole = matmul(x, weight, bias)
    for size, first in ((1, 0), (1, 77), (1, 149), (5, 61), (37, 100), (16, 3), (65, 85)):
        assert same_bits(matmul(x[first : first + size], weight, bias), whole[first : first + size])


@pytest.mark.parametrize("splits", ["apart", "in turn"])
@pytest.mark.parametrize(
    ("group", "kv_heads", "width", "window", "dtype"),
    [
        (1, 2, 64, None, FP32),
        (3, 1, 80, None, FP32),
        (4, 2, 64, 100, FP32),
        (4, 1, 80, 30, BF16),
        (5, 1, 64, None, BF16),
        (16, 1, 16, 600, FP16),
    ],
)
def test_attention_over_pages_is_near_float64(group, kv_heads, width, window, dtype, splits):
    spans = [(0, 3), (129, 1), (0, 0), (70, 20), (521, 2)]  # (tokens in the cache, new tokens)
    tables = [(1, 0, 0, 0, 0), (7, 2, 0, 0, 0), (0, 0, 0, 0, 0), (4, 0, 0, 0, 0), (3, 9, 5, 6, 8)]
    lengths, counts = [past + new for past, new in spans], [new for _, new in spans]
    q = random(1, sum(counts), group * kv_heads, width, dtype=dtype)
    kv = [
        tuple(random(9 * s + i, n, kv_heads, width, dtype=dtype) for i in (2, 3))
        for s, n in enumerate(lengths)
    ]
    first = torch.tensor([0, *counts]).cumsum(0)[:-1].tolist()
    rows = PagedRows(
        tables=int32(*tables),
        first=int32(*first),
        count=int32(*counts),
        start=int32(*(past for past, _ in spans)),
        max_length=max(lengths),
    )
    scratch = {} if splits == "apart" else {"scratch_bytes": 0}
    found = attention(q, *pages_of(kv, tables, 10), rows, Scoring(width**-0.5, window), **scratch)
    for at, count, (k, v) in zip(first, counts, kv, strict=True):
        mine = slice(at, at + count)
        assert_near(found[mine], in_float64(q[mine], k, v, width**-0.5, window), dtype)


@pytest.mark.parametrize(("dtype", "window"), [(FP32, None), (BF16, None), (BF16, 4)])
def test_decode_token_by_token_has_the_bits_of_packed_pass(dtype, window):
    for at in (0, 63, 64, 130, 511, 512, 519):
        assert same_bits(
            new_tokens(at, at + 1, window=window, dtype=dtype),
            packed_pass(window, dtype)[at : at + 1],
        )


@WINDOWS
@pytest.mark.parametrize("chunks", [(14,), (1, 13), (6, 8), (5, 2, 6, 1)])
def test_any_chunking_of_prefill_has_the_bits_of_the_packed_pass(chunks, window):
    start = FROM
    for size in chunks:
        found = new_tokens(start, start + size, window=window)
        assert same_bits(found, packed_pass(window, BF16)[start : start + size])
        start += size
    assert start == LENGTH


@WINDOWS
def test_split_order_and_surplus_splits_change_no_bit(window):
    expected = packed_pass(window, BF16)[FROM:]
    for max_length in (LENGTH, 1025, 4096):
        assert same_bits(new_tokens(FROM, LENGTH, max_length=max_length, window=window), expected)
    assert same_bits(
        new_tokens(FROM, LENGTH, max_length=4096, window=window, scratch_bytes=0), expected
    )


def test_sequences_are_found_among_hundreds_of_unused_places():
    q, k, v = (t[:4] for t in sequence())
    first, start, table = (
        torch.full((300,), 10**6, dtype=torch.int32, device=DEVICE) for _ in range(3)
    )
    count = torch.zeros_like(first)
    for row, place in enumerate((0, 255, 256, 299)):
        first[place], count[place], start[place], table[place] = row, 1, row, 0
    rows = PagedRows(tables=table[:, None], first=first, count=count, start=start, max_length=128)
    assert same_bits(
        attention(q, *pages_of([(k, v)], [(0,)], 1), rows, Scoring(SCALE)),
        packed_pass(None, BF16)[:4],
    )


def test_sequence_beside_others_of_its_prefix_same_bits():
    """A batch of a long prefill, a decode and a chunk; the first two pages belong to all three."""
    q, k, v = sequence()
    prefix = 2 * PAGE
    other_q, *other = (
        random(s, 150, h, WIDTH, dtype=BF16) for s, h in ((7, HEADS), (8, KV_HEADS), (9, KV_HEADS))
    )
    other_k, other_v = torch.cat((k[:prefix], other[0])), torch.cat((v[:prefix], other[1]))
    tables = [TABLE, (3, 0, 5, 2, 0), (3, 0, 5, 2, 0)]
    pages = pages_of([(k, v), (other_k, other_v)], tables[:2], 7)
    rows = PagedRows(
        tables=int32(*tables),
        first=int32(51, 0, 50),
        count=int32(LENGTH - FROM, 50, 1),
        start=int32(FROM, 256, 400),
        max_length=LENGTH,
    )
    found = attention(
        torch.cat((other_q[:50], other_q[144:145], q[FROM:])), *pages, rows, Scoring(SCALE)
    )
    assert same_bits(found[51:], packed_pass(None, BF16)[FROM:])
    alone = PagedRows(
        tables=int32(tables[1]), first=int32(0), count=int32(1), start=int32(400), max_length=2048
    )
    assert same_bits(found[50:51], attention(other_q[144:145], *pages, alone, Scoring(SCALE)))
    together = segment_attention(
        torch.cat((q[:prefix], other_q[:50])),
        torch.cat((k[:prefix], other[0][:50])),
        torch.cat((v[:prefix], other[1][:50])),
        int32((prefix, 50, 0, prefix)),
        Scoring(SCALE),
    )
    assert same_bits(found[:50], together[prefix:])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_segments_of_a_pack_have_the_bits_they_have_over_pages(dtype):
    """A prefix of 40 rows with two continuations, one by itself, and padding."""
    q, k, v = (random(s, 110, h, 80, dtype=dtype) for s, h in ((1, 4), (2, 1), (3, 1)))
    segments = [(0, 40, 0, 0), (40, 21, 0, 40), (61, 9, 0, 40), (75, 30, 75, 0)]
    found = segment_attention(q, k, v, torch.tensor(segments), Scoring(SCALE))
    for first, count, prefix_first, prefix in segments:
        index = [*range(prefix_first, prefix_first + prefix), *range(first, first + count)]
        rows = PagedRows(
            tables=int32([1]),
            first=int32(0),
            count=int32(count),
            start=int32(prefix),
            max_length=128,
        )
        mine = slice(first, first + count)
        assert same_bits(
            found[mine],
            attention(q[mine], *pages_of([(k[index], v[index])], [[1]], 2), rows, Scoring(SCALE)),
        )
        assert_near(found[mine], in_float64(q[mine], k[index], v[index], SCALE, None), dtype)
    assert not found[70:75].any() and not found[105:].any()


def test_writing_the_cache_fills_the_slots_and_nothing_else():
    k, v = (random(s, 5, 6, 80, dtype=BF16)[:, ::2] for s in (1, 2))
    cache = torch.zeros(2, 3, 3, PAGE, 80, dtype=BF16, device=DEVICE)
    slots = [2 * PAGE + 127, 0, -1, PAGE + 5, 2 * PAGE]
    expected = cache.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            for side, t in zip(expected, (k, v), strict=True):
                side[slot // PAGE, :, slot % PAGE] = t[row]
    write_cache(k, v, cache[0], cache[1], torch.tensor(slots, device=DEVICE))
    assert same_bits(cache, expected)
