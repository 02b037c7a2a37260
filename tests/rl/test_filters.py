"""Filters against their definitions; drawing without replacement against its law."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.rl.filters import has_signal, learnability, overlong_penalty, pick


def penalty_by_formula(length, max_tokens, buffer):
    """Eq. 13 of DAPO, with the sign of a penalty."""
    if length <= max_tokens - buffer:
        return 0.0
    return (length - (max_tokens - buffer)) / buffer if length <= max_tokens else 1.0


@given(st.lists(st.sampled_from([0.0, 1.0, 0.1, -2.5]), min_size=1, max_size=6))
def test_group_has_signal_when_two_rewards_differ(rewards):
    assert has_signal(np.array(rewards)) == any(
        a != b for a, b in itertools.combinations(rewards, 2)
    )


@given(st.integers(0, 250), st.integers(1, 100), st.data())
def test_overlong_penalty_equals_the_formula(length, max_tokens, data):
    buffer = data.draw(st.integers(1, max_tokens))
    expected = penalty_by_formula(length, max_tokens, buffer)
    assert overlong_penalty(length, max_tokens, buffer) == pytest.approx(expected, rel=1e-15)
    assert overlong_penalty(length, max_tokens, 0) == 0.0


def test_learnability_is_the_variance_above_a_floor():
    rates = np.array([0.0, 0.125, 0.5, 0.75, 1.0])
    expected = []
    for p in rates.tolist():
        outcomes = [(1.0, p), (0.0, 1 - p)]
        expected.append(sum(weight * (x - p) ** 2 for x, weight in outcomes) + 0.01)
    np.testing.assert_allclose(learnability(rates), expected, rtol=1e-14)
    assert (learnability(rates) > 0).all() and learnability(rates).argmax() == 2


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.001, 0.999)), min_size=1, max_size=12),
    st.data(),
)
def test_picks_are_the_largest_of_uniform_power_1_over_weight(rows, data):
    count = data.draw(st.integers(0, len(rows)))
    weights, uniforms = np.array(rows).T
    keys = [math.log(u) / w for w, u in rows]  # u^(1/w) without its underflow
    expected = sorted(range(len(rows)), key=lambda i: (-keys[i], i))[:count]
    assert pick(weights, uniforms, count).tolist() == expected
