"""Gradients of attention over packed segments: against float64, the same bits twice, and a forward
pass whose bits do not depend on whether gradients are on."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tandem.model.attention import Scoring
from tandem.plugins.triton.packed_attention import PackedSegments, packed_attention, viewers_of
from tests.support.kernels import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    assert_gradient_near,
    assert_near,
    gradients,
    random,
    same_bits,
)

# first row, rows, first row of the prefix, rows of the prefix
ONE_ROW = [(0, 1, 0, 0)]
SEVENTEEN = [(0, 17, 0, 0)]
SHORT_PREFIX = [(0, 1, 0, 0), (1, 17, 0, 1), (18, 1, 0, 1)]
LONG_PREFIX = [(0, 130, 0, 0), (130, 17, 0, 130), (147, 1, 0, 130), (148, 40, 0, 130)]
MIDDLE_PREFIX = [(0, 66, 0, 0), (66, 5, 0, 66), (71, 1, 0, 66), (72, 9, 0, 66)]
# a second group, whose prompt begins in the middle of a block
TWO_GROUPS = [(0, 9, 0, 0), (9, 5, 0, 9), (14, 70, 0, 9), (84, 33, 0, 0), (117, 20, 84, 33)]
# keys of two splits, whose log-sum-exp a second kernel joins
TWO_SPLITS = [(513, 2, 0, 513)]
SCALE = 0.2


def in_float64(segments, window):
    """The reference: each segment's queries over its prefix and itself, one after another."""

    def attend(q, k, v):
        out, group = torch.zeros_like(q), q.shape[1] // k.shape[1]
        for first, rows, prefix_first, prefix in segments:
            place = [*range(prefix_first, prefix_first + prefix), *range(first, first + rows)]
            key = torch.arange(len(place), device=DEVICE)
            position = prefix + torch.arange(rows, device=DEVICE)[:, None]
            hidden = (key > position) | (key <= position - (window or len(place)))
            keys, values = (t[place].repeat_interleave(group, 1) for t in (k, v))
            scores = torch.einsum("qhe,khe->hqk", q[first : first + rows], keys) * SCALE
            probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            mine = torch.einsum("hqk,khe->qhe", probs, values)
            out = out.index_add(0, torch.arange(first, first + rows, device=DEVICE), mine)
        return out

    return attend


def on_triton(segments, window=None):
    plan = PackedSegments(np.array(segments), torch.device(DEVICE))
    return lambda q, k, v: packed_attention(q, k, v, plan, Scoring(SCALE, window))


def inputs(rows, group, kv_heads, width, dtype=FP32):
    heads = (group * kv_heads, kv_heads, kv_heads, group * kv_heads)
    return [random(s, rows, n, width, dtype=dtype) for s, n in enumerate(heads)]


@pytest.mark.parametrize(
    ("segments", "group", "kv_heads", "width", "window", "dtype"),
    [
        (ONE_ROW, 1, 2, 16, None, FP32),
        (SEVENTEEN, 3, 1, 80, None, FP32),
        (SEVENTEEN, 8, 1, 256, None, FP32),
        (SHORT_PREFIX, 8, 1, 96, None, FP32),
        (LONG_PREFIX, 3, 1, 16, None, FP32),
        (LONG_PREFIX, 1, 1, 96, 30, FP32),
        (TWO_GROUPS, 3, 1, 128, 4, FP32),
        (TWO_SPLITS, 1, 1, 16, None, FP32),
        (SEVENTEEN, 8, 1, 256, 5, BF16),
        (TWO_GROUPS, 1, 1, 128, None, BF16),
        (TWO_GROUPS, 1, 1, 80, 100, BF16),
        (SHORT_PREFIX, 8, 1, 64, None, FP16),
    ],
)
def test_gradients_are_near_float64(segments, group, kv_heads, width, window, dtype):
    rows = max(first + count for first, count, *_ in segments) + 3  # padding
    q, k, v, above = inputs(rows, group, kv_heads, width, dtype)
    found = gradients(on_triton(segments, window), q, k, v, above=above)
    expected = gradients(
        in_float64(segments, window), *(t.double() for t in (q, k, v)), above=above.double()
    )
    assert_near(found[0][0], expected[0][0], dtype)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        if len(segments) == 1 and segments[0][1] == 1 and mine is not found[1][2]:
            assert mine.abs().max() < 1e-6  # a token that sees itself alone cannot attend elsewhere
        else:
            assert_gradient_near(mine, theirs, dtype)


@pytest.mark.parametrize(("dtype", "window"), [(FP32, None), (BF16, 30)])
def test_a_packed_segment_has_the_bits_it_has_alone_with_gradients_and_without(dtype, window):
    q, k, v, _ = inputs(81, 3, 1, 80, dtype)
    with torch.no_grad():
        packed = on_triton(MIDDLE_PREFIX, window)(q, k, v)
    with_gradients = on_triton(MIDDLE_PREFIX, window)(q.requires_grad_(), k, v)
    assert with_gradients.requires_grad and same_bits(with_gradients.detach(), packed)
    for first, rows, _, prefix in MIDDLE_PREFIX[1:]:
        place = [*range(prefix), *range(first, first + rows)]
        alone = on_triton([(0, len(place), 0, 0)], window)(*(t[place] for t in (q, k, v)))
        assert same_bits(alone[prefix:].detach(), packed[first : first + rows])


def test_gradients_have_the_same_bits_twice_and_beside_other_rows():
    """A prefix seen by three segments; in the second pass rows of another group come after it."""
    q, k, v, above = inputs(81, 3, 1, 16)
    _, first = gradients(on_triton(MIDDLE_PREFIX), q, k, v, above=above)
    _, again = gradients(on_triton(MIDDLE_PREFIX), q, k, v, above=above)
    longer = [torch.cat((t, random(9, 20, *t.shape[1:]))) for t in (q, k, v, above)]
    both = [*MIDDLE_PREFIX, (81, 20, 0, 0)]
    _, beside = gradients(on_triton(both), *longer[:3], above=longer[3])
    for a, b, c in zip(first, again, beside, strict=True):
        assert same_bits(a, b) and same_bits(a, c[:81])


def test_rows_of_no_segment_get_and_give_no_gradient():
    segments = [(2, 17, 0, 0)]
    q, k, v, above = inputs(30, 3, 1, 16)
    for t in (q, k, v, above):
        t[:2] = t[19:] = float("nan")
    _, found = gradients(on_triton(segments), q, k, v, above=above)
    inside = [t[2:19] for t in (q, k, v)]
    _, alone = gradients(on_triton(SEVENTEEN), *inside, above=above[2:19])
    for mine, theirs in zip(found, alone, strict=True):
        assert not mine[:2].any() and not mine[19:].any()
        torch.testing.assert_close(mine[2:19], theirs)


def test_slices_of_a_fused_projection_and_an_expanded_gradient_change_no_bit():
    q, k, v, _ = inputs(17, 3, 1, 80)
    above = random(7, 1, 1, 80).expand(17, 3, 80)
    fused = torch.cat((q, k, v), 1).split((3, 1, 1), 1)
    one = gradients(on_triton(SEVENTEEN), *fused, above=above)
    other = gradients(on_triton(SEVENTEEN), q, k, v, above=above.clone())
    assert same_bits(one[0][0], other[0][0])
    for a, b in zip(one[1], other[1], strict=True):
        assert same_bits(a, b)


def test_the_lists_name_every_segment_that_sees_a_row_of_a_block_in_order():
    assert [t.tolist() for t in viewers_of(np.array([[0, 70, 0, 0], [70, 10, 0, 70]]))] == [
        [0, 1, 0, 1],
        [0, 2, 4],
    ]
    segments = np.array([*TWO_GROUPS, (137, 300, 84, 33), (437, 0, 0, 0)])
    viewers, starts = viewers_of(segments)
    seen = [
        {*range(first, first + rows), *range(prefix_first, prefix_first + prefix)}
        for first, rows, prefix_first, prefix in segments.tolist()
    ]
    assert len(starts) == -(-437 // 64) + 1
    for block in range(len(starts) - 1):
        rows = set(range(64 * block, 64 * block + 64))
        expected = [number for number, own in enumerate(seen) if own & rows]
        assert viewers[starts[block] : starts[block + 1]].tolist() == expected
