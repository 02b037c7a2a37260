"""Losses over pairs against the papers' formulas in Python floats, their gradients against finite
differences."""

import math

import numpy as np
import pytest
import torch

from tandem.plugins.offline.pair_losses import bradley_terry, dpo, ipo, margins

RNG = np.random.default_rng(0)
CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED = torch.from_numpy(
    RNG.normal(-20, 8, (4, 12))
).unbind(0)
MARGINS = torch.cat(
    [margins(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED), torch.zeros(1)]
).double()


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def dpo_by_formula(margin, beta, smoothing):
    return -(1 - smoothing) * log_sigmoid(beta * margin) - smoothing * log_sigmoid(-beta * margin)


def check(found, losses, margin_sum, wins):
    terms, metrics = found
    np.testing.assert_allclose(terms.detach(), losses, rtol=1e-11, atol=1e-300)
    assert metrics == pytest.approx(
        {"loss": math.fsum(losses), "accuracy": wins, "margin": margin_sum}, rel=1e-11
    )


def test_margin_is_the_gain_in_preference_over_the_reference():
    rows = zip(
        *(x.tolist() for x in (CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED)), strict=True
    )
    expected = [(c - rc) - (r - rr) for c, r, rc, rr in rows]
    np.testing.assert_allclose(
        margins(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED), expected, rtol=1e-12
    )
    assert not margins(CHOSEN, REJECTED, CHOSEN, REJECTED).any()  # a policy that is its reference


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_dpo_equals_the_formula(beta, smoothing):
    values = MARGINS.tolist()
    losses = [dpo_by_formula(m, beta, smoothing) for m in values]
    wins = sum((m > 0) + 0.5 * (m == 0) for m in values)
    check(
        dpo(MARGINS, beta=beta, label_smoothing=smoothing), losses, beta * math.fsum(values), wins
    )
    assert 0 < wins < len(values)


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_ipo_equals_the_formula_and_is_least_at_its_target(beta):
    values = MARGINS.tolist()
    losses = [(m - 1 / (2 * beta)) ** 2 for m in values]
    check(
        ipo(MARGINS, beta=beta),
        losses,
        beta * math.fsum(values),
        sum((m > 0) + 0.5 * (m == 0) for m in values),
    )
    assert ipo(torch.tensor([1 / (2 * beta)]).double(), beta=beta)[0].item() == pytest.approx(
        0.0, abs=1e-12
    )


def test_bradley_terry_equals_the_formula():
    losses = [-log_sigmoid(c - r) for c, r in zip(CHOSEN.tolist(), REJECTED.tolist(), strict=True)]
    gap = math.fsum(CHOSEN.tolist()) - math.fsum(REJECTED.tolist())
    wins = sum(c > r for c, r in zip(CHOSEN.tolist(), REJECTED.tolist(), strict=True))
    check(bradley_terry(CHOSEN, REJECTED), losses, gap, wins)


@pytest.mark.parametrize("name", ["dpo", "conservative dpo", "ipo"])
def test_gradient_of_a_margin_loss_is_that_of_the_formula(name):
    loss = {
        "dpo": lambda m: dpo(m, beta=0.3)[0],
        "conservative dpo": lambda m: dpo(m, beta=0.3, label_smoothing=0.2)[0],
        "ipo": lambda m: ipo(m, beta=0.3)[0],
    }[name]
    assert torch.autograd.gradcheck(loss, MARGINS.clone().requires_grad_())


def test_margins_beyond_the_range_of_exp_stay_finite():
    margin = torch.tensor([-1e4, 1e4], requires_grad=True)
    losses, _ = dpo(margin, beta=1.0, label_smoothing=0.25)
    losses.sum().backward()
    assert losses.tolist() == [7500.0, 2500.0] and margin.grad.tolist() == [-0.75, 0.25]
