"""The losses against loops written from the formulas, their gradients against finite differences."""

import math

import numpy as np
import pytest
import torch

from tandem.rl.losses import negative_log_likelihood, ppo_clip, total, truncated_importance

RNG = np.random.default_rng(0)
N = 60
BEHAVIOUR = torch.from_numpy(RNG.uniform(-4, 0, N))
POLICY = BEHAVIOUR + torch.from_numpy(RNG.normal(0, 0.4, N))
ADVANTAGES = torch.from_numpy(RNG.normal(size=N))
WEIGHTS = torch.from_numpy(RNG.uniform(0.2, 2.0, N))
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def ppo_by_formula(policy, behaviour, advantages, low, high, weights):
    """The sum over tokens of PPO's eq. 7, in Python floats; and the shares that are reported."""
    loss = ratios = clipped = kl = 0.0
    for p, b, a, w in zip(policy.tolist(), behaviour.tolist(), advantages.tolist(), weights.tolist(), strict=True):
        ratio = math.exp(p - b)
        bounded = min(max(ratio, 1 - low), 1 + high)
        loss -= w * min(ratio * a, bounded * a)
        ratios += ratio
        clipped += bounded * a < ratio * a
        kl += 1 / ratio - 1 + math.log(ratio)
    return {"policy_loss": loss, "ratio": ratios, "clip_share": clipped, "approx_kl": kl}


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_the_clipped_loss_equals_the_formula(weights):
    loss, metrics = ppo_clip(POLICY, BEHAVIOUR, ADVANTAGES, denominator=37.0, weights=weights, **CLIP)
    ones = torch.ones(N, dtype=torch.float64)
    expected = ppo_by_formula(POLICY, BEHAVIOUR, ADVANTAGES, 0.2, 0.28, ones if weights is None else weights)
    assert metrics == pytest.approx(expected, rel=1e-12)
    assert 0 < metrics["clip_share"] < N  # both branches were taken
    assert loss.item() == pytest.approx(expected["policy_loss"] / 37.0, rel=1e-12)


def test_the_gradient_of_the_clipped_loss_is_right_on_both_sides_of_every_bound():
    def loss(policy):
        return ppo_clip(policy, BEHAVIOUR, ADVANTAGES, denominator=37.0, weights=WEIGHTS, **CLIP)[0]

    ratio = (POLICY - BEHAVIOUR).exp()
    for side in (ratio < 0.8, (ratio > 0.8) & (ratio < 1.28), ratio > 1.28):
        assert (ADVANTAGES[side] > 0).any() and (ADVANTAGES[side] < 0).any()
    assert torch.autograd.gradcheck(loss, POLICY.clone().requires_grad_())


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high", "passes"),
    [
        (1.25, 1.0, 0.2, 0.2, False),  # too likely already
        (1.25, 1.0, 0.2, 0.28, True),  # clip-higher: the upper bound is its own
        (1.25, 1.0, 0.28, 0.2, False),
        (0.75, -1.0, 0.2, 0.28, False),  # too unlikely already
        (0.75, -1.0, 0.28, 0.2, True),
        (1.9, -1.0, 0.2, 0.2, True),  # a mistake that got likelier is always pushed back
        (0.1, 1.0, 0.2, 0.2, True),  # and so is a success that got less likely
    ],
)
def test_clipping_is_asymmetric_and_never_stops_the_way_back(ratio, advantage, low, high, passes):
    policy = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, metrics = ppo_clip(
        policy, torch.zeros(1), torch.tensor([advantage]), denominator=1.0, clip_low=low, clip_high=high
    )
    loss.backward()
    assert metrics["clip_share"] == (not passes)
    assert policy.grad.item() == (pytest.approx(-ratio * advantage) if passes else 0.0)


def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_is_the_advantage():
    policy = BEHAVIOUR.float().requires_grad_()
    loss, metrics = ppo_clip(policy, policy.detach().clone(), ADVANTAGES.float(), denominator=64.0, **CLIP)
    loss.backward()
    assert (metrics["ratio"], metrics["clip_share"], metrics["approx_kl"]) == (N, 0.0, 0.0)
    assert metrics["policy_loss"] == -total(ADVANTAGES.float())
    assert torch.equal(policy.grad, -ADVANTAGES.float() / 64.0)


@pytest.mark.parametrize("name", ["ppo", "nll"])
def test_microbatches_add_up_to_the_whole_batch(name):
    def loss(policy, part):
        if name == "nll":
            return negative_log_likelihood(policy[part], denominator=float(N))
        weights = WEIGHTS[part]
        return ppo_clip(policy[part], BEHAVIOUR[part], ADVANTAGES[part], denominator=float(N), weights=weights, **CLIP)

    whole = POLICY.clone().requires_grad_()
    value, metrics = loss(whole, slice(None))
    value.backward()
    split = POLICY.clone().requires_grad_()
    parts = [loss(split, slice(a, b)) for a, b in ((0, 1), (1, 20), (20, 20), (20, N))]
    for part, _ in parts:
        part.backward()
    assert torch.equal(whole.grad, split.grad)
    # the value is a sum in another order; the gradient above is exact
    assert sum(part.item() for part, _ in parts) == pytest.approx(value.item(), rel=1e-12)
    assert {k: sum(m[k] for _, m in parts) for k in metrics} == pytest.approx(metrics, rel=1e-12)


def test_truncated_importance_is_exactly_one_for_equal_logprobs():
    assert torch.equal(truncated_importance(BEHAVIOUR.float(), BEHAVIOUR.float(), 2.0), torch.ones(N))


def test_truncated_importance_is_the_ratio_up_to_the_cap_and_carries_no_gradient():
    weights = truncated_importance(POLICY.clone().requires_grad_(), BEHAVIOUR, 1.3)
    expected = [min(math.exp(p - b), 1.3) for p, b in zip(POLICY.tolist(), BEHAVIOUR.tolist(), strict=True)]
    np.testing.assert_allclose(weights, expected, rtol=1e-12)
    assert weights.max() == 1.3 and not weights.requires_grad


def test_the_likelihood_loss_is_the_token_mean_with_a_constant_gradient():
    policy = POLICY.clone().requires_grad_()
    loss, metrics = negative_log_likelihood(policy, denominator=64.0)
    loss.backward()
    assert metrics["nll"] == pytest.approx(-math.fsum(POLICY.tolist()), rel=1e-12)
    assert loss.item() == pytest.approx(metrics["nll"] / 64.0, rel=1e-12)
    assert torch.equal(policy.grad, torch.full_like(POLICY, -1 / 64.0))


def test_a_total_has_the_same_bits_for_one_and_two_threads():
    values = torch.from_numpy(np.random.default_rng(1).normal(size=200_000).astype(np.float32))
    before, sums = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        sums.append(total(values))
    torch.set_num_threads(before)
    assert sums[0] == sums[1]
