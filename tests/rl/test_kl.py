"""The estimators of KL(policy || reference) against their formulas and against the KL they estimate."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.rl.kl import kl_estimate

KINDS = ("k1", "k2", "k3")
FORMULA = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: math.exp(-d) - 1 + d}


def logprobs(seed, size=50):
    return torch.from_numpy(np.random.default_rng(seed).uniform(-4, 0, size))


@pytest.mark.parametrize("kind", KINDS)
def test_an_estimate_equals_its_formula_token_by_token(kind):
    policy, reference = logprobs(0), logprobs(1)
    expected = [FORMULA[kind](p - r) for p, r in zip(policy.tolist(), reference.tolist(), strict=True)]
    np.testing.assert_allclose(kl_estimate(kind, policy, reference), expected, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kl_of_identical_logprobs_is_exactly_zero(kind):
    policy = logprobs(0).float().requires_grad_()
    estimate = kl_estimate(kind, policy, policy.detach().clone())
    estimate.sum().backward()
    assert (estimate == 0.0).all()
    assert kind == "k1" or (policy.grad == 0.0).all()


@given(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32))
def test_k2_and_k3_are_never_negative(policy, reference):
    for kind in ("k2", "k3"):
        assert kl_estimate(kind, torch.tensor([policy]), torch.tensor([reference]))[0] >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_formula(kind):
    reference = logprobs(1)
    assert torch.autograd.gradcheck(
        partial(kl_estimate, kind, reference_logprobs=reference), logprobs(0).requires_grad_()
    )


def test_k1_and_k3_have_the_kl_as_their_expectation_and_k2_has_its_gradient():
    """Over all tokens of a vocabulary of 9, weighted by the policy: no sampling, so no noise."""
    logits = logprobs(2, 9).requires_grad_()
    policy, reference = logits.log_softmax(-1), logprobs(3, 9).log_softmax(-1)
    kl = (policy.exp() * (policy - reference)).sum()
    for kind in ("k1", "k3"):
        assert (policy.exp() * kl_estimate(kind, policy, reference)).sum().item() == pytest.approx(kl.item(), rel=1e-12)
    [expected] = torch.autograd.grad(kl, logits, retain_graph=True)
    [found] = torch.autograd.grad((policy.exp().detach() * kl_estimate("k2", policy, reference)).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
