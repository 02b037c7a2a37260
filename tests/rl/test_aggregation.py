"""The weights of tokens against the papers' means, written as loops; and their independence of how
a batch is split."""

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.rl.aggregation import Aggregation, sequence_weights

KINDS = get_args(Aggregation)
MAX_TOKENS = 50


def by_formula(kind, sequences, max_tokens):
    """One number from the losses of tokens, a list a sequence."""
    sums = [math.fsum(s) for s in sequences]
    return {
        "token_mean": lambda: math.fsum(sums) / sum(len(s) for s in sequences),
        "sequence_mean": lambda: (
            math.fsum(x / len(s) for x, s in zip(sums, sequences, strict=True) if len(s))
            / len(sums)
        ),
        "fixed_length": lambda: math.fsum(x / max_tokens for x in sums) / len(sums),
    }[kind]()


def weighted_sum(weights, sequences):
    return math.fsum(w * x for w, s in zip(weights.tolist(), sequences, strict=True) for x in s)


@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=6), min_size=1, max_size=6))
def test_weighted_sum_is_the_papers_mean_for_any_lengths(sequences):
    lengths = np.array([len(s) for s in sequences])
    for kind in KINDS:
        found = weighted_sum(sequence_weights(kind, lengths, 6), sequences)
        assert found == pytest.approx(by_formula(kind, sequences, 6), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_all_sequences_masked_leaves_finite_weights(kind):
    assert np.isfinite(sequence_weights(kind, np.zeros(4, np.int64), MAX_TOKENS)).all()
