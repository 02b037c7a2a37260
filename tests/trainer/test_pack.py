"""Packed microbatches against the definition, sample by sample: what each target's row can see, and
nothing lost."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.trainer.pack import join, pack, split
from tests.support.tiny import make_sample


def seen_by(batch, row):
    """(tokens, positions) that a row attends to, itself last."""
    [(first, _, prefix_first, prefix)] = [
        s for s in batch.segments.tolist() if s[0] <= row < s[0] + s[1]
    ]
    rows = [*range(prefix_first, prefix_first + prefix), *range(first, row + 1)]
    return batch.tokens[rows].tolist(), batch.positions[rows].tolist()


def by_definition(samples):
    """(context, target) of every loss token, by sample."""
    return {
        number: [
            (s.tokens[:place].tolist(), s.tokens[place]) for place in np.flatnonzero(s.loss_mask)
        ]
        for number, s in enumerate(samples)
    }


def unpacked(batches):
    """The same, out of the microbatches; every sample is in one of them, once."""
    found = {}
    for batch in batches:
        for place, number in enumerate(batch.samples.tolist()):
            assert number not in found
            found[number] = []
            for row, target in zip(
                *(part[batch.sequences == place] for part in (batch.rows, batch.targets)),
                strict=True,
            ):
                context, positions = seen_by(batch, row)
                assert positions == list(range(len(context)))
                found[number].append((context, target))
    return found


def own_rows(sample):
    return len(sample.tokens) - 1 - sample.prefix


def clusters(samples, keep_groups, budget):
    """Rows of what cannot be split, by definition: neighbours of a group behind one prefix, as many
    as fit."""
    sizes, last = [], None
    for sample in samples:
        key = (sample.group, sample.prefix)
        joined = key == last and (
            keep_groups or (sample.prefix and sizes[-1] + own_rows(sample) <= budget)
        )
        if joined:
            sizes[-1] += own_rows(sample)
        else:
            sizes.append(sample.prefix + own_rows(sample))
        last = key
    return sizes


@st.composite
def groups_of_samples(draw):
    samples = []
    for group in range(draw(st.integers(1, 5))):
        prefix = draw(st.integers(0, 7))
        prompt = draw(st.lists(st.integers(0, 9), min_size=prefix, max_size=prefix))
        for _ in range(draw(st.integers(1, 4))):
            # a single token without a prompt has nothing to train and no row; everything longer is
            # drawn
            own = draw(st.lists(st.integers(0, 9), min_size=1 if prefix else 2, max_size=9))
            mask = draw(st.lists(st.booleans(), min_size=len(own), max_size=len(own)))
            mask[0] = mask[0] and prefix > 0  # nothing predicts the first token of a sequence
            samples.append(
                make_sample(prompt + own, [False] * prefix + mask, prefix=prefix, group=group)
            )
    return samples


packings = given(samples=groups_of_samples(), budget=st.integers(1, 60), keep_groups=st.booleans())


@packings
def test_sample_is_packed_once_and_sees_its_own_prefix_only(samples, budget, keep_groups):
    batches = pack(samples, budget, keep_groups=keep_groups)
    assert unpacked(batches) == by_definition(samples)
    for batch in batches:
        runs = [range(first, first + count) for first, count, _, _ in batch.segments.tolist()]
        rows = list(range(len(batch.tokens)))  # each of one segment
        assert list(chain(*runs)) == rows and len(batch.positions) == len(rows)


@packings
def test_the_budget_is_kept_unless_what_belongs_together_is_longer(samples, budget, keep_groups):
    for batch in pack(samples, budget, keep_groups=keep_groups):
        groups = {samples[number].group for number in batch.samples}
        pieces = groups if keep_groups else batch.samples
        assert len(batch.tokens) <= budget or len(pieces) == 1
        if keep_groups:
            # whole, and in their order, too: the loss of pairs relies on it
            members = [number for number, sample in enumerate(samples) if sample.group in groups]
            assert batch.samples.tolist() == members


@packings
def test_microbatches_differ_by_at_most_the_largest_piece(samples, budget, keep_groups):
    pieces = clusters(samples, keep_groups, budget)
    sizes = [len(batch.tokens) for batch in pack(samples, budget, keep_groups=keep_groups)]
    assert sum(sizes) == sum(pieces) and max(sizes) - min(sizes) <= max(pieces)


@packings
def test_join_puts_values_beside_targets_and_split_inverts_it(samples, budget, keep_groups):
    batches = pack(samples, budget, keep_groups=keep_groups)
    columns = [s.tokens[s.loss_mask] + 1000 * number for number, s in enumerate(samples)]
    joined = join(batches, columns)
    for batch, column in zip(batches, joined, strict=True):
        assert np.array_equal(column, batch.targets + 1000 * batch.samples[batch.sequences])
    back = split(batches, joined)
    assert sorted(back) == list(range(len(samples)))
    assert all(np.array_equal(back[number], column) for number, column in enumerate(columns))


@pytest.mark.parametrize(
    ("tokens", "mask", "prefix"),
    [
        ([5, 9], [False, False], 2),
        ([5, 9], [True, False], 0),
        ([5, 9, 2], [False, True, True], 2),
        ([5], [False], 1),
    ],
)
def test_a_sample_that_cannot_be_trained_is_refused(tokens, mask, prefix):
    with pytest.raises(ValueError, match="sample of group 7"):
        pack([make_sample(tokens, mask, prefix=prefix, group=7)], 100)
