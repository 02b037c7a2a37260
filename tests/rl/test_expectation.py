"""The expectation of each estimator: its mean over *every* group of episodes against the enumerated
gradient.

Nothing is sampled, so an unbiased estimator equals its gradient to rounding, and a bias is a
number.
"""

from functools import cache, partial

import numpy as np
import pytest
import torch

from benchmarks import bias
from tandem.plugins.distill.divergences import sampled_advantages
from tandem.rl import advantages as adv
from tandem.rl.corrections import correction
from tandem.rl.losses import cispo, kl_estimate, ppo_clip, reinforce, sequence_weights, value_clip
from tandem.rl.returns import gae, returns_to_go, token_rewards
from tests.support import toy

WORLDS = {
    "table, real rewards": toy.world(toy.process(3, 3), toy.table_policy, binary=False, seed=0),
    "table, 0/1 rewards": toy.world(toy.process(4, 2), toy.table_policy, binary=True, seed=1),
    "two layers, real rewards": toy.world(
        toy.process(3, 3), toy.two_layer_policy, binary=False, seed=2
    ),
    "two layers, 0/1 rewards": toy.world(
        toy.process(3, 4), toy.two_layer_policy, binary=True, seed=3
    ),
}
NO_CLIP = {"clip_low": 1.0, "clip_high": 1e9}
HUGE = 1e9

every_world = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)


def group_cases(kept):
    """Every group of 2, and of 3 where there are at most 15 sequences, of the worlds whose name
    passes."""
    return pytest.mark.parametrize(
        ("world", "size"),
        [
            pytest.param(world, size, id=f"{name}, G={size}")
            for name, world in WORLDS.items()
            for size in (2, 3)
            if kept in name and len(world.rewards) ** size < 4000
        ],
    )


every_group = group_cases("")


@cache
def groups_of(world, size):
    return toy.all_groups(world, size)


def rewards_of(world, batch):
    """float64 [M, G]"""
    return world.rewards[batch.picks].numpy()


def weights_of(batch, aggregation="fixed_length"):
    """[N]; max_tokens 1, so that fixed_length is the mean over episodes of the sum over tokens."""
    return batch.per_token(
        np.stack([sequence_weights(aggregation, lengths, 1) for lengths in batch.lengths])
    )


def policy_gradient(
    world, batch, advantages, *, aggregation="fixed_length", behaviour=None, corrections=1.0
):
    """The mean estimate of `reinforce` with advantages [N]."""
    values = toy.estimates(
        world,
        batch,
        lambda p: reinforce(p, advantages)[0],
        weights_of(batch, aggregation) * corrections,
    )
    return toy.expectation(world, batch, values, behaviour)


def group_gradient(world, size, advantages, **how):
    """The mean estimate of `reinforce` with a group's advantages, a function [M, G] -> [M, G]."""
    batch = groups_of(world, size)
    return policy_gradient(
        world, batch, batch.per_token(advantages(rewards_of(world, batch))), **how
    )


def token_gradient(world, advantages):
    """The mean estimate of `reinforce` from single episodes with an advantage for every step,
    [T]."""
    batch = groups_of(world, 1)
    return policy_gradient(world, batch, torch.as_tensor(advantages)[batch.rows])


def loss_gradient(world, losses):
    """The mean gradient of a loss of single episodes' tokens; losses: log-probs [N], rows [N] ->
    [N]."""
    batch = groups_of(world, 1)
    return -toy.expectation(
        world,
        batch,
        toy.estimates(world, batch, lambda p: losses(p, batch.rows), weights_of(batch)),
    )


def each_sequence(world, function, *tables):
    """[T]: function(reward, *tables' entries of the sequence's steps), sequence by sequence."""
    sizes = world.process.lengths.tolist()
    parts = zip(
        *(np.split(np.asarray(table), np.cumsum(sizes)[:-1]) for table in tables), strict=True
    )
    return np.concatenate(
        [function(r, *part) for r, part in zip(world.rewards.tolist(), parts, strict=True)]
    )


def another(world, seed=7):
    """Another policy's log-probs [prefixes, V]: a reference, a teacher."""
    return world.table(toy.parameters(world.process, world.policy, seed=seed)).detach()


def stale(world, distance=0.5):
    """The parameters of an older policy."""
    move = toy.parameters(world.process, world.policy, seed=11)
    return world.parameters + distance * move


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def relative_bias(found, expected):
    return float((found - expected).norm() / expected.norm())


# Advantages of whole episodes.


@every_world
def test_reinforce_is_unbiased_with_any_fixed_baseline(world):
    expected = world.gradient(toy.expected_reward(world))
    for baseline in (0.0, 0.7, -3.0):
        assert_equal(group_gradient(world, 1, partial(adv.against, baseline=baseline)), expected)


@every_group
def test_rloo_is_unbiased(world, size):
    assert_equal(group_gradient(world, size, adv.rloo), world.gradient(toy.expected_reward(world)))


@every_group
def test_centred_reward_gives_g_minus_1_over_g_of_the_gradient(world, size):
    expected = world.gradient(toy.expected_reward(world)) * (size - 1) / size
    assert_equal(group_gradient(world, size, adv.centred), expected)


@every_group
def test_max_at_k_is_unbiased_for_the_best_of_k(world, size):
    for k in range(2, size + 1):
        found = group_gradient(world, size, partial(adv.max_at_k, k=k))
        assert_equal(found, world.gradient(toy.best_of(world, k)))


@group_cases("0/1 rewards")
def test_grpo_of_0_1_rewards_is_the_gradient_times_mean_std(world, size):
    """E[std of the group] / (p (1 - p)) times the gradient of p, which is 1 / std in the limit of
    large groups."""
    p = float(world.chances() @ world.rewards)
    batch = groups_of(world, size)
    std = torch.from_numpy(rewards_of(world, batch).std(1))
    mean = float(world.chances()[batch.picks].prod(1) @ (std**2 / (std + 1e-6)))
    found = group_gradient(world, size, adv.grpo)
    assert_equal(found, world.gradient(toy.expected_reward(world)) * mean / (p * (1 - p)))


# Advantages of single tokens.


def gae_gradient(world, values, lam):
    """values [prefixes]: what the critic says of each."""

    def advantages(reward, values):
        return gae(token_rewards(reward, np.zeros(len(values)), 0.0), values, 1.0, lam)[0]

    return token_gradient(world, each_sequence(world, advantages, values[world.process.place]))


def wrong_values(world):
    return torch.from_numpy(np.random.default_rng(9).normal(size=len(world.process.prefixes)))


def exact_values(world):
    return toy.state_values(world, world.rewards[world.process.owner])


@every_world
def test_gae_with_lambda_1_is_unbiased_whatever_the_values(world):
    assert_equal(
        gae_gradient(world, wrong_values(world), 1.0), world.gradient(toy.expected_reward(world))
    )


@every_world
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_gae_with_exact_values_is_unbiased_for_any_lambda(world, lam):
    assert_equal(
        gae_gradient(world, exact_values(world), lam), world.gradient(toy.expected_reward(world))
    )


@every_world
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_exact_value_function_is_where_the_critic_rests(world, lam):
    """The mean of GAE's returns at every prefix is its value, so the mean gradient of the value
    loss there is 0."""
    exact = exact_values(world)[world.process.place]

    def returns(reward, values):
        return gae(token_rewards(reward, np.zeros(len(values)), 0.0), values, 1.0, lam)[1]

    targets = torch.from_numpy(each_sequence(world, returns, exact))
    assert_equal(toy.state_values(world, targets), exact_values(world))
    values = exact.clone().requires_grad_()
    [slope] = torch.autograd.grad(
        value_clip(values, values.detach(), targets, 0.0)[0].sum(), values
    )
    assert_equal(
        toy.state_values(world, slope),
        torch.zeros(len(world.process.prefixes), dtype=torch.float64),
    )


def kl_in_reward(world, reference, kind, beta):
    def advantages(reward, kl):
        return returns_to_go(token_rewards(reward, kl, beta), 1.0)

    kl = kl_estimate(kind, world.logprobs(), world.steps(reference))
    return token_gradient(world, each_sequence(world, advantages, kl))


@every_world
def test_k1_as_token_reward_gives_gradient_of_reward_minus_kl(world):
    reference, beta = another(world), 0.3
    expected = world.gradient(
        lambda p: toy.expected_reward(world)(p) - beta * toy.reverse_kl(world, reference)(p)
    )
    assert_equal(kl_in_reward(world, reference, "k1", beta), expected)


# Policy losses.


@every_world
def test_unbounded_ppo_and_cispo_are_reinforce_with_token_ratio(world):
    batch, behaviour = groups_of(world, 2), stale(world)
    engine = world.logprobs(behaviour)[batch.rows]
    advantages = batch.per_token(adv.rloo(rewards_of(world, batch)))
    ratio = (world.logprobs()[batch.rows] - engine).exp()
    expected = policy_gradient(world, batch, advantages, behaviour=behaviour, corrections=ratio)
    for loss in (ppo_clip, cispo):
        moves = toy.estimates(
            world,
            batch,
            lambda p, loss=loss: loss(p, engine, advantages, **NO_CLIP)[0],
            weights_of(batch),
        )
        assert_equal(toy.expectation(world, batch, moves, behaviour), expected)


# KL estimators and distillation.


@every_world
def test_k1_and_k3_are_unbiased_for_the_kl_and_k2_is_not(world):
    reference = another(world)
    kl = toy.reverse_kl(world, reference)(world.parameters)
    found = {
        kind: world.chances()
        @ world.process.spread(kl_estimate(kind, world.logprobs(), world.steps(reference)))
        for kind in ("k1", "k2", "k3")
    }
    assert_equal(found["k1"], kl)
    assert_equal(found["k3"], kl)
    assert abs(found["k2"] / kl - 1) > 0.03


@every_world
def test_gradient_of_a_kl_estimate_as_a_loss(world):
    reference = another(world)
    k1, k2, k3 = (
        loss_gradient(world, lambda p, rows: kl_estimate(kind, p, world.steps(reference)[rows]))  # noqa: B023
        for kind in ("k1", "k2", "k3")
    )
    assert_equal(k1, torch.zeros_like(world.parameters))
    assert_equal(k2, of_tokens := world.gradient(toy.own_reverse_kl(world, reference)))
    # which is not the gradient of the KL of sequences: a token changes which prefixes come after it
    assert relative_bias(k2, world.gradient(toy.reverse_kl(world, reference))) > 0.05
    # of KL(reference || policy), although its value estimates KL(policy || reference)
    assert_equal(k3, world.gradient(toy.own_forward_kl(world, reference)))
    assert relative_bias(k3, of_tokens) > 0.1


@every_world
def test_sampled_distillation_descends_each_tokens_kl(world):
    teacher = another(world)
    advantages = sampled_advantages(world.logprobs(), world.steps(teacher))
    assert_equal(
        token_gradient(world, advantages), -world.gradient(toy.own_reverse_kl(world, teacher))
    )


@every_world
def test_distillation_with_returns_descends_the_sequence_kl(world):
    teacher = another(world)
    rewards = sampled_advantages(world.logprobs(), world.steps(teacher))
    advantages = each_sequence(world, lambda _, rewards: returns_to_go(rewards, 1.0), rewards)
    assert_equal(token_gradient(world, advantages), -world.gradient(toy.reverse_kl(world, teacher)))


# Off-policy corrections: episodes of an older policy.


def corrected_gradient(world, size, advantages, kind, *, cap=HUGE, low=0.0):
    batch, behaviour = groups_of(world, size), stale(world)
    engine = world.logprobs(behaviour)[batch.rows]
    weights = correction(
        kind, world.logprobs()[batch.rows], engine, batch.episodes, low=low, cap=cap
    )
    return group_gradient(world, size, advantages, behaviour=behaviour, corrections=weights)


@every_group
@pytest.mark.parametrize("kind", ["tis_sequence", "mis"])
def test_uncapped_sequence_ratio_is_unbiased_off_policy(world, size, kind):
    assert_equal(
        corrected_gradient(world, size, adv.rloo, kind), world.gradient(toy.expected_reward(world))
    )


@every_world
def test_token_ratio_climbs_the_surrogate_of_the_behaviour(world):
    """sum over prefixes of the behaviour's visits x E_policy[the behaviour's action value] (Kakade,
    Langford 2002)."""
    behaviour = stale(world)
    visits, values = toy.visits(world, behaviour), toy.action_values(world, behaviour)
    expected = world.gradient(lambda p: (visits[:, None] * world.table(p).exp() * values).sum())
    assert_equal(
        corrected_gradient(world, 1, partial(adv.against, baseline=0.4), "decoupled"), expected
    )


# What results/bias.md shows.


@cache
def stale_worlds():
    return bias.measure_all()


def stale_biases(name):
    """[worlds, staleness]"""
    return np.array([[entry.bias for entry in measured.rows[name]] for measured in stale_worlds()])


TOKEN_ROWS = ("`decoupled`", "`tis`", "`icepop`")
UNCAPPED = "`tis_sequence` without a cap"


def test_corrections_are_unbiased_for_fresh_episodes():
    for name in bias.ROWS:
        assert stale_biases(name)[:, 0].max() < 1e-9, name
    assert stale_biases(UNCAPPED).max() < 1e-9


def test_one_stale_step_is_a_bias_without_the_sequence_ratio():
    for name in (
        bias.NOTHING,
        *TOKEN_ROWS,
        "none, `ppo_clip` around the engine's",
        "`max_logprob_error`, `reinforce`",
    ):
        assert stale_biases(name)[:, 1].min() > 1e-3, name
