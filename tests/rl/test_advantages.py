"""Advantages against loops written from the papers' formulas."""

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.rl.advantages import Advantage, advantages, loss_denominator

KINDS = get_args(Advantage)
REWARDS = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)


def by_formula(kind, group):
    """The advantages of one group, in Python floats."""
    size, mean = len(group), math.fsum(group) / len(group)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / size)
    out = []
    for number, reward in enumerate(group):
        others = [r for i, r in enumerate(group) if i != number]
        out.append(
            {
                "grpo": (reward - mean) / (std + 1e-6),
                "grpo_no_std": reward - mean,
                "dr_grpo": reward - mean,
                "rloo": reward - math.fsum(others) / len(others),
            }[kind]
        )
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_advantages_equal_the_formula_for_every_group(kind):
    table = advantages(kind, REWARDS)
    expected = [by_formula(kind, [float(r) for r in group]) for group in REWARDS]
    assert table.dtype == np.float32 and table.shape == REWARDS.shape
    # both are float64 inside and differ in the order of a sum; what is left is the rounding to float32
    np.testing.assert_allclose(table, expected, rtol=1e-6, atol=1e-7)


def test_advantages_of_a_plain_case_are_the_numbers_of_a_hand_calculation():
    rewards = np.array([[1, 0, 0, 1], [1, 0, 0, 0]], np.float32)
    assert advantages("dr_grpo", rewards).tolist() == [[0.5, -0.5, -0.5, 0.5], [0.75, -0.25, -0.25, -0.25]]
    assert advantages("rloo", rewards)[1].tolist() == [1.0, *[np.float32(-1 / 3)] * 3]
    np.testing.assert_allclose(advantages("grpo", rewards)[0], [1, -1, -1, 1], rtol=3e-6)  # std 0.5, epsilon 1e-6
    # std of [1, 0, 0, 0] is sqrt(3) / 4 with G in the denominator; 1 / 2 with G - 1
    np.testing.assert_allclose(advantages("grpo", rewards)[1, 0], 0.75 / (math.sqrt(3) / 4), rtol=3e-6)


@given(reward=st.floats(-1e6, 1e6, width=32), size=st.integers(2, 64), kind=st.sampled_from(KINDS))
def test_a_group_of_equal_rewards_has_exactly_zero_advantages(reward, size, kind):
    assert not advantages(kind, np.full((1, size), reward, np.float32)).any()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_rloo_is_the_centred_reward_times_g_over_g_minus_1(size):
    rewards = REWARDS.reshape(-1)[: size * 4].reshape(4, size)
    expected = advantages("dr_grpo", rewards).astype(np.float64) * size / (size - 1)
    np.testing.assert_allclose(advantages("rloo", rewards), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_does_not_see_the_other_groups_nor_the_order_of_its_episodes(kind):
    table = advantages(kind, REWARDS)
    for row, group in enumerate(REWARDS):
        assert np.array_equal(advantages(kind, group[None])[0], table[row])
    order = np.random.default_rng(1).permutation(REWARDS.shape[1])
    np.testing.assert_allclose(advantages(kind, REWARDS[:, order]), table[:, order], rtol=1e-6, atol=1e-7)


def test_only_grpo_divides_by_the_spread_of_the_rewards():
    big = advantages("grpo", REWARDS * 1024)
    np.testing.assert_allclose(big, advantages("grpo", REWARDS), rtol=1e-5)
    for kind in set(KINDS) - {"grpo"}:
        assert np.array_equal(advantages(kind, REWARDS * 1024), advantages(kind, REWARDS) * 1024)


def test_the_rewards_are_left_as_they_were():
    rewards = REWARDS.copy()
    for kind in KINDS:
        advantages(kind, rewards)
    assert np.array_equal(rewards, REWARDS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_denominator_is_the_tokens_and_for_dr_grpo_a_constant(kind):
    of = {count: loss_denominator(kind, num_loss_tokens=count, num_episodes=6, max_new_tokens=50) for count in (0, 40)}
    assert of == ({0: 300.0, 40: 300.0} if kind == "dr_grpo" else {0: 1.0, 40: 40.0})
