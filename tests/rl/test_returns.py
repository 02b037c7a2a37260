"""Token rewards, returns, GAE and whitening against double sums written from the definitions."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tandem.rl.returns import gae, returns_to_go, token_rewards, whiten

numbers = arrays(np.float64, st.integers(1, 12), elements=st.floats(-10, 10))
shares = st.floats(0, 1)


def discounted_sum(rewards, start, gamma):
    return math.fsum(gamma ** (t - start) * float(rewards[t]) for t in range(start, len(rewards)))


def gae_by_formula(rewards, values, gamma, lam):
    """Eq. 16 as the sum it is: A_t = sum_l (gamma lam)^l delta_{t + l}; the state after the last
    token is worth 0."""
    values = [*values.tolist(), 0.0]
    deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards.tolist())]
    return [discounted_sum(deltas, t, gamma * lam) for t in range(len(deltas))]


@given(kl=numbers, reward=st.floats(-5, 5), coef=shares)
def test_token_rewards_have_the_reward_at_the_last_token(kl, reward, coef):
    before = kl.copy()
    found = token_rewards(reward, kl, coef)
    expected = [
        -coef * x + (reward if t == len(kl) - 1 else 0.0) for t, x in enumerate(kl.tolist())
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    assert found.dtype == np.float64 and np.array_equal(kl, before)


@given(rewards=numbers, gamma=shares)
def test_returns_are_discounted_sums_of_what_is_ahead(rewards, gamma):
    expected = [discounted_sum(rewards, t, gamma) for t in range(len(rewards))]
    np.testing.assert_allclose(returns_to_go(rewards, gamma), expected, rtol=1e-12, atol=1e-12)


@given(rewards=numbers, gamma=shares, lam=shares, data=st.data())
def test_gae_is_the_sum_of_discounted_errors(rewards, gamma, lam, data):
    values = data.draw(arrays(np.float64, len(rewards), elements=st.floats(-10, 10)))
    advantages, returns = gae(rewards, values, gamma, lam)
    np.testing.assert_allclose(
        advantages, gae_by_formula(rewards, values, gamma, lam), rtol=1e-10, atol=1e-10
    )
    np.testing.assert_allclose(returns, advantages + values, rtol=1e-15)


def test_whitening_uses_mean_and_std_of_all_tokens_together():
    rng = np.random.default_rng(1)
    arrays_ = [rng.normal(3, 5, size) for size in (4, 1, 7)]
    tokens = [float(x) for array in arrays_ for x in array]
    mean = math.fsum(tokens) / 12
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in tokens) / 12)
    found = whiten(arrays_)
    assert [len(a) for a in found] == [4, 1, 7]
    for array, before in zip(found, arrays_, strict=True):
        np.testing.assert_allclose(
            array, [(float(x) - mean) / (std + 1e-8) for x in before], rtol=1e-12
        )


def test_whitening_equal_tokens_gives_exactly_0():
    assert [a.tolist() for a in whiten([np.full(3, 0.5), np.full(1, 0.5)])] == [[0.0] * 3, [0.0]]
    assert whiten([np.array([7.0])])[0].tolist() == [0.0]
