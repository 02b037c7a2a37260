"""The estimators of KL(policy || reference) against their formulas and against the KL they
estimate."""

import math

import numpy as np
import pytest
import torch

from tandem.rl.kl import kl_estimate

KINDS = ("k1", "k2", "k3")
FORMULA = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: math.exp(-d) - 1 + d}
SLOPE = {"k1": lambda d: 1.0, "k2": lambda d: d, "k3": lambda d: 1 - math.exp(-d)}


def logprobs(seed, size=50):
    return torch.from_numpy(np.random.default_rng(seed).uniform(-4, 0, size))


@pytest.mark.parametrize("kind", KINDS)
def test_kl_estimate_and_slope_equal_the_formula(kind):
    policy, reference = logprobs(0).requires_grad_(), logprobs(1)
    estimate = kl_estimate(kind, policy, reference)
    estimate.sum().backward()
    distances = [p - r for p, r in zip(policy.tolist(), reference.tolist(), strict=True)]
    np.testing.assert_allclose(estimate.detach(), [FORMULA[kind](d) for d in distances], rtol=1e-11)
    np.testing.assert_allclose(policy.grad, [SLOPE[kind](d) for d in distances], rtol=1e-11)


def test_k3_of_an_all_but_impossible_token_is_bounded():
    """Without a bound d = -24 has a gradient of 2.6e10 and d = -94 is infinite in float32."""
    for distance in (-24.0, -94.0, 94.0):
        policy = torch.tensor([distance], requires_grad=True)
        estimate = kl_estimate("k3", policy, torch.zeros(1))
        estimate.sum().backward()
        assert estimate.item() == pytest.approx(
            FORMULA["k3"](math.copysign(20.0, distance)), rel=1e-6
        )
        assert policy.grad.item() == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_kl_of_identical_logprobs_is_exactly_0(kind):
    policy = logprobs(0).float().requires_grad_()
    estimate = kl_estimate(kind, policy, policy.detach().clone())
    estimate.sum().backward()
    assert (estimate == 0.0).all()
    assert kind == "k1" or (policy.grad == 0.0).all()
