"""Packed microbatches against the definition, sample by sample: what each target's row can see, and nothing lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.train.pack import pack
from tests.tiny import make_sample, random_samples


def seen_by(batch, row):
    """(tokens, positions) that a row attends to, itself last."""
    [(first, _, prefix_first, prefix)] = [s for s in batch.segments.tolist() if s[0] <= row < s[0] + s[1]]
    rows = [*range(prefix_first, prefix_first + prefix), *range(first, row + 1)]
    return batch.tokens[rows].tolist(), batch.positions[rows].tolist()


def by_definition(samples):
    """(context, target, engine log-prob, advantage) of every loss token, sample by sample."""
    return [
        (s.tokens[:place].tolist(), s.tokens[place], s.engine_logprobs[place], s.advantages[place])
        for s in samples
        for place in np.flatnonzero(s.loss_mask)
    ]


def unpacked(batches):
    found = []
    for batch in batches:
        for number, row in enumerate(batch.rows.tolist()):
            context, positions = seen_by(batch, row)
            assert positions == list(range(len(context)))
            found.append((context, batch.targets[number], batch.engine_logprobs[number], batch.advantages[number]))
    return found


def distinct_values(samples):
    """Replace what a sample carries by values that tell every token of every sample apart."""
    out, start = [], 1
    for sample in samples:
        values = np.arange(start, start + len(sample.tokens), dtype=np.float32)
        start += len(values)
        out.append(
            make_sample(
                sample.tokens, sample.loss_mask, prefix=sample.prefix, group=sample.group, engine_logprobs=-values
            )
        )
    return out


@st.composite
def groups_of_samples(draw):
    samples = []
    for group in range(draw(st.integers(1, 5))):
        prefix = draw(st.integers(0, 7))
        prompt = draw(st.lists(st.integers(0, 9), min_size=prefix, max_size=prefix))
        for _ in range(draw(st.integers(1, 4))):
            # a single token without a prompt has nothing to train and no row; everything longer is drawn
            own = draw(st.lists(st.integers(0, 9), min_size=1 if prefix else 2, max_size=9))
            mask = draw(st.lists(st.booleans(), min_size=len(own), max_size=len(own)))
            mask[0] = mask[0] and prefix > 0  # nothing predicts the first token of a sequence
            samples.append(make_sample(prompt + own, [False] * prefix + mask, prefix=prefix, group=group))
    return distinct_values(samples)


@given(samples=groups_of_samples(), budget=st.integers(1, 60))
def test_every_loss_token_is_packed_once_in_order_and_sees_exactly_its_own_prefix(samples, budget):
    assert unpacked(pack(samples, budget)) == by_definition(samples)


@given(samples=groups_of_samples(), budget=st.integers(1, 60))
def test_the_budget_is_kept_unless_a_single_sample_is_longer(samples, budget):
    for batch in pack(samples, budget):
        if len(batch.tokens) > budget:
            first, *own = batch.segments.tolist()
            assert not own or own == [[first[1], len(batch.tokens) - first[1], 0, first[1]]]


@given(samples=groups_of_samples(), budget=st.integers(1, 60))
def test_every_row_belongs_to_exactly_one_segment(samples, budget):
    for batch in pack(samples, budget):
        rows = [row for first, count, _, _ in batch.segments.tolist() for row in range(first, first + count)]
        assert rows == list(range(len(batch.tokens))) == list(range(len(batch.positions)))


def test_the_example_of_the_docstring_is_what_comes_out():
    logprobs = np.array([0, 0, 0, -0.5, -0.25], np.float32)
    mask = [False, False, False, True, True]
    samples = [
        make_sample([5, 9, 2, 7, 1], mask, prefix=3, engine_logprobs=logprobs, advantage=0.75),
        make_sample([5, 9, 2, 8, 1], mask, prefix=3, engine_logprobs=logprobs, advantage=-0.75),
    ]
    [batch] = pack(samples, 100)
    assert batch.tokens.tolist() == [5, 9, 2, 7, 8]
    assert batch.positions.tolist() == [0, 1, 2, 3, 3]
    assert batch.segments.tolist() == [[0, 3, 0, 0], [3, 1, 0, 3], [4, 1, 0, 3]]
    assert batch.rows.tolist() == [2, 3, 2, 4]
    assert batch.targets.tolist() == [7, 1, 8, 1]
    assert batch.engine_logprobs.tolist() == [-0.5, -0.25] * 2
    assert batch.advantages.tolist() == [0.75, 0.75, -0.75, -0.75]


def test_a_shared_prefix_appears_once_for_its_group_and_not_across_groups():
    mask = [False] * 10 + [True] * 4
    prompt = list(range(10))
    samples = [make_sample([*prompt, *[n] * 4], mask, prefix=10, group=n // 4) for n in range(8)]
    [batch] = pack(samples, 1000)
    assert len(batch.tokens) == 2 * (10 + 4 * 3)
    assert (batch.tokens == 0).sum() == 2 + 3  # the first token of two prompts, and sample 0's own
    assert [len(b.tokens) for b in pack(samples, 15)] == [10 + 3] * 8  # alone, each carries its prompt


def test_a_group_larger_than_the_budget_is_split_and_repeats_its_prefix_as_seldom_as_possible():
    mask = [False] * 10 + [True] * 4
    samples = [make_sample([*range(10), *[n] * 4], mask, prefix=10) for n in range(8)]
    batches = pack(samples, 20)  # the prefix and three responses of three rows
    assert [len(b.tokens) for b in batches] == [19, 19, 16]
    assert unpacked(batches) == by_definition(samples)


def test_responses_of_one_token_have_no_rows_of_their_own():
    samples = [make_sample([5, 9, 2, n], [False] * 3 + [True], prefix=3) for n in (7, 8)]
    [batch] = pack(samples, 100)
    assert (batch.tokens.tolist(), batch.rows.tolist(), batch.targets.tolist()) == ([5, 9, 2], [2, 2], [7, 8])
    assert batch.segments.tolist() == [[0, 3, 0, 0]]


def test_no_samples_make_no_microbatches():
    assert pack([], 100) == []


@pytest.mark.parametrize("budget", [1, 50, 10_000])
def test_packing_is_the_same_every_time_and_leaves_the_samples_alone(budget):
    samples = random_samples(np.random.default_rng(0), 4)
    copies = [s.tokens.copy() for s in samples]
    for one, other in zip(pack(samples, budget), pack(samples, budget), strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes() and one.rows.tobytes() == other.rows.tobytes()
    assert all(np.array_equal(s.tokens, c) for s, c in zip(samples, copies, strict=True))
