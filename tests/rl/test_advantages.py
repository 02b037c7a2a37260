"""Advantages of episodes against loops written from the papers' formulas, and against the gradients
they estimate."""

import itertools
import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tandem.rl.advantages import gdpo, max_at_k, running_mean
from tandem.rl.algorithms import ADVANTAGES, estimator
from tandem.rl.losses import Aggregation, sequence_weights
from tandem.rl.returns import whiten

# those of a table of rewards
KINDS = [name for name, part in ADVANTAGES.items() if not part.by_token and name != "gdpo"]
BASELINE_FROM_GROUP = [kind for kind in KINDS if kind != "ema"]
EPSILON = 1e-6
K, BASELINE = 3, 0.25
# two problems with equal rewards, solved and failed, between those of mixed ones; the last row has
# ties
REWARDS = np.array(
    [*np.random.default_rng(0).normal(size=(5, 5)), [1.0] * 5, [0.0] * 5, [1.0, 0.0, 1.0, 1.0, 0.0]]
)


def advantages(kind, rewards, k=K):
    return estimator(kind).bind(rewards=rewards, k=k, baseline=BASELINE)()


def mean(values):
    return math.fsum(values) / len(values)


def std(values):
    """With the count in the denominator."""
    return math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / len(values))


def mean_gain(reward, others, k):
    """The mean over all sets J of k - 1 others of max(r, max J) - max J, set by set."""
    sets = list(itertools.combinations(others, k - 1))
    return math.fsum(max(reward, *chosen) - max(chosen) for chosen in sets) / len(sets)


def by_formula(kind, table, k=K):
    """The advantages of a step, in Python floats."""
    table = [[float(r) for r in group] for group in table]
    rows = []
    for group in table:
        row = []
        for place, reward in enumerate(group):
            others = group[:place] + group[place + 1 :]
            row.append(
                {
                    "grpo": lambda r, g, o: (r - mean(g)) / (std(g) + EPSILON),
                    "grpo_no_std": lambda r, g, o: r - mean(g),
                    "rloo": lambda r, g, o: r - mean(o),
                    "rloo_std": lambda r, g, o: (r - mean(o)) / (std(g) + EPSILON),
                    "max_at_k": lambda r, g, o: k * mean_gain(r, o, k),
                    "reinforce_pp_baseline": lambda r, g, o: r - mean(g),  # not whitened yet
                    "ema": lambda r, g, o: r - BASELINE,
                }[kind](reward, group, others)
            )
        rows.append(row)
    return rows


@given(
    rewards=arrays(
        np.float64, st.tuples(st.integers(1, 4), st.integers(2, 7)), elements=st.floats(-100, 100)
    ),
    data=st.data(),
)
def test_advantages_equal_the_formula_for_any_rewards(rewards, data):
    k = data.draw(st.integers(2, rewards.shape[1]))
    for table in (rewards, rewards.round(-2)):  # with ties, too
        for kind in KINDS:
            expected = by_formula(kind, table, k)
            # a spread near epsilon turns the rounding of the mean, 1e-14 for rewards of 100, into
            # 1e-8
            atol = 1e-7 if kind in ("grpo", "rloo_std") else 1e-11
            np.testing.assert_allclose(advantages(kind, table, k), expected, rtol=1e-9, atol=atol)


@pytest.mark.parametrize("kind", BASELINE_FROM_GROUP)
@given(reward=st.floats(-1e6, 1e6, width=32), size=st.integers(2, 64))
def test_equal_rewards_in_float32_have_exactly_0_advantage(kind, reward, size):
    assert not advantages(kind, np.full((2, size), reward), k=2).any()


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "reinforce_pp_baseline"])
def test_group_of_one_episode_has_advantage_0(kind):
    assert advantages(kind, np.array([[0.7], [-2.0]])).tolist() == [[0.0], [0.0]]


def test_gdpo_compares_only_the_episodes_that_a_reward_applies_to():
    """TRL counts a None as none, too: as 0 it would be punished among ones and paid among
    penalties."""
    nan, right = math.nan, np.array([[0.0, 1.0, 0.0, 1.0]])
    for among in ([1.0, 1.0, nan, 1.0], [nan, -1.0, -1.0, -1.0]):
        found = gdpo(np.stack([right, np.array([among])]), np.ones(2))
        np.testing.assert_array_equal(found, gdpo(right[None], np.ones(1)))
    some = gdpo(np.array([[[nan, 2.0, nan, 3.0], [nan] * 4]]), np.ones(1))
    assert some[0, 1] < some[0, 0] == some[0, 2] < some[0, 3] and not some[1].any()


@pytest.mark.parametrize(("size", "k"), [(g, k) for g in range(2, 8) for k in range(2, g + 1)])
def test_max_at_k_equals_the_enumeration_of_all_sets(size, k):
    rewards = np.random.default_rng(size).integers(0, 4, (3, size)).astype(float)  # with ties
    expected = by_formula("max_at_k", rewards, k)
    np.testing.assert_allclose(max_at_k(rewards, k), expected, rtol=1e-12, atol=1e-14)


def test_max_at_k_of_a_large_group_stays_finite():
    """C(2999, 1499) is about 1e900; of many equal failures one success lifts every set by one."""
    rewards = np.zeros((1, 3000))
    rewards[0, 17] = 1.0
    found = max_at_k(rewards, 1500)
    np.testing.assert_allclose(found[0, 17], 1500.0, rtol=1e-10)
    assert np.count_nonzero(found) == 1


def test_running_mean_starts_at_the_first_and_forgets_by_decay():
    steps, decay = [REWARDS[:2], REWARDS[2:4] + 1, REWARDS[4:] - 3], 0.9
    found = None
    for step in steps:
        found = running_mean(found, step, decay)
    means = [mean(step.reshape(-1).tolist()) for step in steps]
    assert found == pytest.approx(
        decay**2 * means[0] + decay * (1 - decay) * means[1] + (1 - decay) * means[2]
    )
    # 0 is a value, not an absence
    assert running_mean(0.0, REWARDS, decay) == pytest.approx(0.1 * REWARDS.mean())


def test_whitening_equal_tokens_gives_exactly_0():
    assert [a.tolist() for a in whiten([np.full(3, 0.5), np.full(1, 0.5)])] == [[0.0] * 3, [0.0]]
    assert whiten([np.array([7.0])])[0].tolist() == [0.0]


@pytest.mark.parametrize("kind", get_args(Aggregation))
def test_weights_of_sequences_that_are_all_masked_are_finite(kind):
    assert np.isfinite(sequence_weights(kind, np.zeros(4, np.int64), 50)).all()
