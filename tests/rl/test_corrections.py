"""The off-policy corrections against loops over tokens and sequences, and against the bias they are
to remove."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.rl.corrections import Correction, correction, sequence_errors

KINDS = get_args(Correction)
BOUNDS = {"low": 0.5, "cap": 2.0}
LENGTHS = [1, 4, 12, 1, 6, 9]
RNG = np.random.default_rng(0)
SEQUENCES = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
ENGINE = torch.from_numpy(RNG.uniform(-4, 0, sum(LENGTHS)))
PROXIMAL = ENGINE + torch.from_numpy(RNG.normal(0, 0.7, sum(LENGTHS)))

logprobs = st.floats(-6, 0)
sequences_of_pairs = st.lists(
    st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=5), min_size=1, max_size=4
)


def by_formula(kind, rows, low, cap):
    """One weight a token, from lists of (proximal, engine) log-probs, one list a sequence."""
    weights = []
    for row in rows:
        product = math.prod(math.exp(p) / math.exp(e) for p, e in row)
        for p, e in row:
            ratio = math.exp(p) / math.exp(e)
            weights.append(
                {
                    "none": 1.0,
                    "decoupled": ratio,
                    "tis": min(ratio, cap),
                    "tis_sequence": min(product, cap),
                    "icepop": ratio if low <= ratio <= cap else 0.0,
                    "mis": product if product <= cap else 0.0,
                    "mis_geometric": ratio if low <= product ** (1 / len(row)) <= cap else 0.0,
                }[kind]
            )
    return weights


def flat(rows):
    pairs = torch.tensor([pair for row in rows for pair in row], dtype=torch.float64)
    lengths = torch.tensor([len(row) for row in rows])
    return *pairs.unbind(1), torch.arange(len(rows)).repeat_interleave(lengths)


@given(sequences_of_pairs, st.floats(0.1, 1.0), st.floats(1.0, 5.0))
def test_correction_equals_its_formula_for_any_sequences(rows, low, cap):
    for kind in KINDS:
        expected = by_formula(kind, rows, low, cap)
        found = correction(kind, *flat(rows), low=low, cap=cap).tolist()
        for x, y in zip(found, expected, strict=True):
            # at a bound the rounding of exp decides, and both sides are right: the ratio itself or
            # 0
            means = [math.exp(sum(p - e for p, e in row) / len(row)) for row in rows]
            near = min(abs(edge - bound) for edge in (x, y, *means) for bound in (low, cap))
            assert x == pytest.approx(y, rel=1e-9) or near < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_exact_engine_makes_every_weight_exactly_1(kind):
    engine = ENGINE.float()
    # even with no room at all between the bounds
    found = correction(kind, engine, engine.clone(), SEQUENCES, low=1.0, cap=1.0)
    assert torch.equal(found, torch.ones(len(engine)))
    assert torch.equal(sequence_errors(engine, engine.clone(), SEQUENCES), torch.ones(len(LENGTHS)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_passes_through_a_correction(kind):
    leaves = [column.clone().requires_grad_() for column in (PROXIMAL, ENGINE)]
    assert not correction(kind, *leaves, SEQUENCES, **BOUNDS).requires_grad


def test_ratio_exactly_at_a_bound_is_kept():
    """exp(0) = 1 is the one ratio that is exact whatever the library's rounding."""
    one = *torch.zeros(2, 3, dtype=torch.float64), torch.tensor([0, 0, 1])
    for low, cap in ((1.0, 2.0), (0.5, 1.0)):
        assert correction("icepop", *one, low=low, cap=cap).tolist() == [1.0] * 3
    assert correction("mis", *one, low=0.0, cap=1.0).tolist() == [1.0] * 3
    assert correction("icepop", *one, low=1 + 1e-12, cap=2.0).tolist() == [0.0] * 3
    assert correction("mis", *one, low=0.0, cap=1 - 1e-12).tolist() == [0.0] * 3


def test_product_beyond_every_float_is_capped_or_masked():
    far = torch.full((200,), 1.0)  # exp(200) is infinite in float32
    sequences = torch.zeros(200, dtype=torch.int64)
    capped = correction("tis_sequence", far, torch.zeros(200), sequences, **BOUNDS)
    masked = correction("mis", far, torch.zeros(200), sequences, **BOUNDS)
    assert (capped == 2.0).all() and (masked == 0.0).all()
