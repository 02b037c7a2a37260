"""The losses against loops written from the papers' formulas, their gradients against finite
differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.rl.losses import cispo, gspo, kl_estimate, ppo_clip

RNG = np.random.default_rng(0)
LENGTHS = [1, 7, 2, 1, 30, 19]
N = sum(LENGTHS)
SEQUENCES = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
PROXIMAL = torch.from_numpy(RNG.uniform(-4, 0, N))
# a part of the noise is common to a sequence, so that the ratios of sequences leave the clip range
# as well
POLICY = PROXIMAL + torch.from_numpy(
    RNG.normal(0, 0.4, N) + RNG.normal(0, 0.3, len(LENGTHS))[SEQUENCES]
)
ADVANTAGES = torch.from_numpy(RNG.normal(size=N))
ADVANTAGES[3] = 0.0
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
RATIO_METRICS = ("policy_loss", "ratio", "clip_share", "approx_kl")

logprobs = st.floats(-8, 0)
tokens = st.lists(
    st.tuples(logprobs, logprobs, st.sampled_from([0.0, 1.0, -1.0, 0.3, -2.5])),
    min_size=1,
    max_size=8,
)


def clamp(x, low, high):
    return min(max(x, low), high)


def by_formula(kind, policy, proximal, advantages, lengths, *, clip_low, clip_high, dual_clip=0.0):
    """Token by token in Python floats: eq. 7 of PPO with eq. 5 of dual clip; eq. 4-5 of CISPO; eq.
    5-7 of GSPO, whose ratio is that of the sequence, (product of ratios)^(1 / |y|), one entry a
    token. And the sums that are reported."""
    losses, clipped, ratios = [], [], []
    each = [math.exp(p - q) for p, q in zip(policy.tolist(), proximal.tolist(), strict=True)]
    for length in lengths:
        own = each[len(ratios) : len(ratios) + length]
        ratios += [math.prod(own) ** (1 / len(own))] * len(own) if kind == "gspo" else own
    for ratio, p, a in zip(ratios, policy.tolist(), advantages.tolist(), strict=True):
        bounded = clamp(ratio, 1 - clip_low, 1 + clip_high)
        if kind == "cispo":
            losses.append(-bounded * a * p)
            clipped.append(bounded != ratio)
            continue
        objective = min(ratio * a, bounded * a)
        if dual_clip and a < 0:
            objective = max(objective, dual_clip * a)
        losses.append(-objective)
        clipped.append(objective != ratio * a)
    kl = [1 / r - 1 + math.log(r) for r in ratios]
    sums = (math.fsum(losses), math.fsum(ratios), sum(clipped), math.fsum(kl))
    return losses, dict(zip(RATIO_METRICS, sums, strict=True))


def check(found, expected, *skipped):
    (terms, metrics), (losses, sums) = found, expected
    np.testing.assert_allclose(terms.detach(), losses, rtol=1e-10, atol=1e-12)
    left = sums.keys() - set(skipped)
    expected = {name: sums[name] for name in left}
    assert {name: metrics[name] for name in left} == pytest.approx(expected, rel=1e-10, abs=1e-12)


def gradient(loss, policy):
    policy = policy.clone().requires_grad_()
    loss(policy)[0].sum().backward()
    return policy.grad


def token(value):
    return torch.tensor([value], dtype=torch.float64)


# --- clipped ratio of tokens


@given(tokens, st.floats(0, 0.9), st.floats(0, 3), st.sampled_from([0.0, 1.5, 10.0]))
def test_clipped_loss_equals_formula_for_any_tokens_and_bounds(rows, low, high, dual_clip):
    columns = torch.tensor(rows, dtype=torch.float64).unbind(1)
    bounds = {"clip_low": low, "clip_high": high, "dual_clip": dual_clip}
    expected = by_formula("ppo", *columns, [len(rows)], **bounds)
    # at a bound the rounding of exp decides
    check(ppo_clip(*columns, **bounds), expected, "clip_share")


@pytest.mark.parametrize("dual_clip", [0.0, 1.5])
def test_clipped_loss_gradient_is_right_around_every_bound(dual_clip):
    ratio = (POLICY - PROXIMAL).exp()
    for side in (ratio < 0.8, (ratio > 0.8) & (ratio < 1.28), ratio > 1.28):
        assert (ADVANTAGES[side] > 0).any() and (ADVANTAGES[side] < 0).any()
    assert ((ratio > 1.5) & (ADVANTAGES < 0)).any()
    assert torch.autograd.gradcheck(
        lambda p: ppo_clip(p, PROXIMAL, ADVANTAGES, dual_clip=dual_clip, **CLIP)[0],
        POLICY.clone().requires_grad_(),
    )


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("scale", "passes"), [(1.0, True), (1 + 1e-9, True), (1 - 1e-9, False)])
def test_ratio_exactly_at_a_bound_is_not_yet_clipped(advantage, scale, passes):
    """The bound that matters: above for A > 0, below for A < 0. 1 +- clip is exact, as the ratio is
    within [1/2, 2]."""
    policy = token(math.log(1 + 0.25 * advantage))
    ratio = policy.exp().item()
    clip = abs(ratio - 1) * scale

    def loss(p):
        return ppo_clip(p, token(0.0), token(advantage), clip_low=clip, clip_high=clip)

    assert loss(policy)[1]["clip_share"] == (not passes)
    assert loss(policy)[0].item() == pytest.approx(-ratio * advantage)
    assert gradient(loss, policy).item() == (-ratio * advantage if passes else 0.0)


# --- clipped ratio of sequences


@given(
    st.lists(
        st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=5), min_size=1, max_size=4
    ),
    st.randoms(),
)
def test_sequence_loss_equals_the_formula_for_any_lengths(rows, random):
    lengths = [len(row) for row in rows]
    pairs = [pair for row in rows for pair in row]
    policy, proximal = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    sequences = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
    drawn = [random.choice([-1.0, 0.0, 2.0]) for _ in rows]
    advantages = torch.tensor(drawn, dtype=torch.float64)[sequences]
    expected = by_formula("gspo", policy, proximal, advantages, lengths, **CLIP)
    check(gspo(policy, proximal, advantages, sequences, **CLIP), expected, "clip_share")


def test_token_advantages_in_a_sequence_pull_their_own_tokens():
    """A penalty on tokens 3 and 4, and token 2 left out by a correction (GSPO-token, section
    4.3)."""
    advantages, factors = torch.tensor([0.0, 0.0, -1.0, -1.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    policy, sequences = torch.zeros(4), torch.zeros(4, dtype=torch.int64)

    def loss(p, a):
        return gspo(p, torch.zeros(4), a, sequences, **CLIP)[0] * factors / 4, {}

    assert gradient(lambda p: loss(p, advantages), policy).tolist() == [0.0, 0.0, 0.25, 0.25]
    assert gradient(lambda p: loss(p, torch.ones(4)), policy).tolist() == [-0.25, 0.0, -0.25, -0.25]


def test_cispo_equals_the_formula():
    found = cispo(POLICY, PROXIMAL, ADVANTAGES, **CLIP)
    check(found, by_formula("cispo", POLICY, PROXIMAL, ADVANTAGES, LENGTHS, **CLIP))
    assert 0 < found[1]["clip_share"] < N


# --- all


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("proximal", [-100.0, -700.0])
def test_ratio_too_large_for_float32_stays_finite(advantage, proximal):
    policy = torch.tensor([-0.5, -0.5], requires_grad=True)
    given = torch.full((2,), proximal), torch.full((2,), advantage)
    terms, metrics = ppo_clip(policy, *given, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    terms.sum().backward()
    assert torch.isfinite(terms).all() and torch.isfinite(policy.grad).all()
    assert np.isfinite(list(metrics.values())).all()
    assert not policy.grad.any()


def test_k3_of_an_all_but_impossible_token_is_bounded():
    """Without a bound d = -24 has a gradient of 2.6e10 and d = -94 is infinite in float32."""
    for distance in (-24.0, -94.0, 94.0):
        policy = torch.tensor([distance], requires_grad=True)
        estimate = kl_estimate("k3", policy, torch.zeros(1))
        estimate.sum().backward()
        bounded = math.copysign(20.0, distance)
        assert estimate.item() == pytest.approx(math.exp(-bounded) - 1 + bounded, rel=1e-6)
        assert policy.grad.item() == 0.0
