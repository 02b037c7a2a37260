"""The losses against loops written from the papers' formulas, their gradients against finite
differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.plugins.distill.divergences import sampled_advantages
from tandem.rl.losses import cispo, gspo, negative_log_likelihood, ppo_clip, reinforce, value_clip

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
OF_SEQUENCE = torch.tensor([1.0, -0.5, 2.0, -1.0, 0.7, -0.3], dtype=torch.float64)[SEQUENCES]
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


def ratio_metrics(losses, ratios, clipped):
    kl = [1 / r - 1 + math.log(r) for r in ratios]
    return dict(
        zip(
            RATIO_METRICS,
            (math.fsum(losses), math.fsum(ratios), sum(clipped), math.fsum(kl)),
            strict=True,
        )
    )


def ppo_by_formula(policy, proximal, advantages, *, clip_low, clip_high, dual_clip=0.0):
    """Eq. 7 of PPO token by token, with eq. 5 of dual clip, in Python floats; and the sums that are
    reported."""
    losses, ratios, clipped = [], [], []
    for p, q, a in zip(policy.tolist(), proximal.tolist(), advantages.tolist(), strict=True):
        ratio = math.exp(p - q)
        objective = min(ratio * a, clamp(ratio, 1 - clip_low, 1 + clip_high) * a)
        if dual_clip and a < 0:
            objective = max(objective, dual_clip * a)
        losses.append(-objective)
        ratios.append(ratio)
        clipped.append(objective != ratio * a)
    return losses, ratio_metrics(losses, ratios, clipped)


def gspo_by_formula(policy, proximal, advantages, lengths, *, clip_low, clip_high):
    """Eq. 5-7 of GSPO: s = (product of ratios)^(1 / |y|), clipped for the sequence; one entry a
    token."""
    losses, ratios, clipped, start = [], [], [], 0
    for length in lengths:
        product = 1.0
        for t in range(start, start + length):
            product *= math.exp(policy[t].item() - proximal[t].item())
        s = product ** (1 / length)
        for a in advantages[start : start + length].tolist():
            bounded = clamp(s, 1 - clip_low, 1 + clip_high)
            losses.append(-min(s * a, bounded * a))
            clipped.append(bounded * a < s * a)
        ratios += [s] * length
        start += length
    return losses, ratio_metrics(losses, ratios, clipped)


def cispo_by_formula(policy, proximal, advantages, *, clip_low, clip_high):
    """Eq. 4-5 of CISPO, token by token."""
    losses, ratios, clipped = [], [], []
    for p, q, a in zip(policy.tolist(), proximal.tolist(), advantages.tolist(), strict=True):
        ratio = math.exp(p - q)
        weight = clamp(ratio, 1 - clip_low, 1 + clip_high)
        losses.append(-weight * a * p)
        ratios.append(ratio)
        clipped.append(weight != ratio)
    return losses, ratio_metrics(losses, ratios, clipped)


def check(found, expected):
    (terms, metrics), (losses, sums) = found, expected
    np.testing.assert_allclose(terms.detach(), losses, rtol=1e-10, atol=1e-12)
    assert metrics == pytest.approx(sums, rel=1e-10, abs=1e-12)


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
    (terms, metrics), (losses, sums) = (f(*columns, **bounds) for f in (ppo_clip, ppo_by_formula))
    np.testing.assert_allclose(terms, losses, rtol=1e-10, atol=1e-12)
    del sums["clip_share"]  # at a bound the rounding of exp decides
    assert {name: metrics[name] for name in sums} == pytest.approx(sums, rel=1e-10, abs=1e-12)


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


def test_ratio_on_policy_is_1_and_gradient_is_the_advantage():
    policy, advantages = PROXIMAL.float().requires_grad_(), OF_SEQUENCE.float()
    clipped, metrics = ppo_clip(policy, policy.detach().clone(), advantages, dual_clip=2.0, **CLIP)
    clipped.sum().backward()
    assert (metrics["ratio"], metrics["clip_share"], metrics["approx_kl"]) == (N, 0.0, 0.0)
    assert torch.equal(clipped.detach(), -advantages)
    assert torch.equal(policy.grad, -advantages)
    losses = (
        lambda p: cispo(p, p.detach(), advantages, **CLIP),
        lambda p: gspo(p, p.detach(), advantages, SEQUENCES, **CLIP),
        lambda p: reinforce(p, advantages),
    )
    for loss in losses:
        assert torch.equal(gradient(loss, policy.detach()), -advantages)


# --- clipped ratio of sequences


@given(
    st.lists(
        st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=5), min_size=1, max_size=4
    ),
    st.randoms(),
)
def test_sequence_loss_equals_the_formula_for_any_lengths(rows, random):
    lengths = [len(row) for row in rows]
    policy, proximal = torch.tensor(
        [pair for row in rows for pair in row], dtype=torch.float64
    ).unbind(1)
    sequences = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
    advantages = torch.tensor([random.choice([-1.0, 0.0, 2.0]) for _ in rows], dtype=torch.float64)[
        sequences
    ]
    terms, metrics = gspo(policy, proximal, advantages, sequences, **CLIP)
    losses, sums = gspo_by_formula(policy, proximal, advantages, lengths, **CLIP)
    np.testing.assert_allclose(terms, losses, rtol=1e-10, atol=1e-12)
    for name in ("policy_loss", "ratio", "approx_kl"):
        assert metrics[name] == pytest.approx(sums[name], rel=1e-9, abs=1e-11)


def test_sequence_loss_gradient_is_that_of_the_papers_objective():
    """Eq. 5, one term a sequence, by autograd; the mean over a sequence's tokens has the same
    gradient."""
    policy = POLICY.clone().requires_grad_()
    for i, length in enumerate(LENGTHS):
        s = ((policy - PROXIMAL)[i == SEQUENCES].sum() / length).exp()
        a = OF_SEQUENCE[i == SEQUENCES][0]
        (-torch.minimum(s * a, s.clamp(0.8, 1.28) * a)).backward()
    means = 1 / torch.tensor(LENGTHS, dtype=torch.float64)[SEQUENCES]
    found = gradient(
        lambda p: (means * gspo(p, PROXIMAL, OF_SEQUENCE, SEQUENCES, **CLIP)[0], {}), POLICY
    )
    torch.testing.assert_close(found, policy.grad, rtol=1e-12, atol=1e-15)


def test_token_advantages_in_a_sequence_pull_their_own_tokens():
    """A penalty on tokens 3 and 4, and token 2 left out by a correction (GSPO-token, section
    4.3)."""
    advantages, factors = torch.tensor([0.0, 0.0, -1.0, -1.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    policy, sequences = torch.zeros(4), torch.zeros(4, dtype=torch.int64)

    def loss(p, a):
        return gspo(p, torch.zeros(4), a, sequences, **CLIP)[0] * factors / 4, {}

    assert gradient(lambda p: loss(p, advantages), policy).tolist() == [0.0, 0.0, 0.25, 0.25]
    assert gradient(lambda p: loss(p, torch.ones(4)), policy).tolist() == [-0.25, 0.0, -0.25, -0.25]


# --- losses whose ratio is a weight, or absent


def test_cispo_equals_the_formula():
    found = cispo(POLICY, PROXIMAL, ADVANTAGES, **CLIP)
    check(found, cispo_by_formula(POLICY, PROXIMAL, ADVANTAGES, **CLIP))
    assert 0 < found[1]["clip_share"] < N


def test_cispo_gradient_is_clipped_ratio_times_advantage():
    """Not that of the loss's value, whose ratio also moves: eq. 4 stops the gradient there."""
    found = gradient(lambda p: cispo(p, PROXIMAL, ADVANTAGES, **CLIP), POLICY)
    ratios = [math.exp(p - q) for p, q in zip(POLICY.tolist(), PROXIMAL.tolist(), strict=True)]
    expected = [-clamp(r, 0.8, 1.28) * a for r, a in zip(ratios, ADVANTAGES.tolist(), strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert torch.equal(found == 0, ADVANTAGES == 0)


def test_reinforce_equals_formula_and_gradient_is_advantage():
    terms, metrics = reinforce(POLICY, ADVANTAGES)
    expected = [-a * p for a, p in zip(ADVANTAGES.tolist(), POLICY.tolist(), strict=True)]
    assert terms.tolist() == expected
    assert metrics == pytest.approx({"policy_loss": math.fsum(expected)}, rel=1e-12)
    assert torch.autograd.gradcheck(
        lambda p: reinforce(p, ADVANTAGES)[0], POLICY.clone().requires_grad_()
    )


def test_teachers_advantages_give_the_gradient_of_the_reverse_kl():
    """Over a vocabulary of 7 and weighted by the student: no sampling, so no noise."""
    logits = POLICY[:7].clone().requires_grad_()
    student, teacher = logits.log_softmax(-1), PROXIMAL[:7].log_softmax(-1)
    [expected] = torch.autograd.grad(
        (student.exp() * (student - teacher)).sum(), logits, retain_graph=True
    )
    advantages = sampled_advantages(student.detach(), teacher)
    assert advantages.tolist() == [
        t - s for t, s in zip(teacher.tolist(), student.tolist(), strict=True)
    ]
    [found] = torch.autograd.grad(
        (student.detach().exp() * reinforce(student, advantages)[0]).sum(), logits
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


# --- all


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "reinforce", "nll", "value"])
def test_microbatches_of_whole_sequences_add_up_to_the_batch(name):
    def loss(policy, part):
        sequences = SEQUENCES[part] - (SEQUENCES[part][0] if len(SEQUENCES[part]) else 0)
        return {
            "ppo": lambda: ppo_clip(
                policy[part], PROXIMAL[part], ADVANTAGES[part], dual_clip=1.5, **CLIP
            ),
            "gspo": lambda: gspo(
                policy[part], PROXIMAL[part], OF_SEQUENCE[part], sequences, **CLIP
            ),
            "cispo": lambda: cispo(policy[part], PROXIMAL[part], ADVANTAGES[part], **CLIP),
            "reinforce": lambda: reinforce(policy[part], ADVANTAGES[part]),
            "nll": lambda: negative_log_likelihood(policy[part]),
            "value": lambda: value_clip(policy[part], PROXIMAL[part], ADVANTAGES[part], 0.2),
        }[name]()

    whole = POLICY.clone().requires_grad_()
    terms, metrics = loss(whole, slice(None))
    terms.sum().backward()
    split = POLICY.clone().requires_grad_()
    parts = [loss(split, slice(a, b)) for a, b in ((0, 1), (1, 10), (10, 10), (10, N))]
    for part, _ in parts:
        part.sum().backward()
    assert torch.equal(torch.cat([part for part, _ in parts]), terms)
    assert torch.equal(whole.grad, split.grad)
    # the metrics are sums in another order; terms and gradients above are exact
    assert {k: sum(m[k] for _, m in parts) for k in metrics} == pytest.approx(metrics, rel=1e-12)


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("proximal", [-100.0, -700.0])
def test_ratio_too_large_for_float32_stays_finite(advantage, proximal):
    policy = torch.tensor([-0.5, -0.5], requires_grad=True)
    terms, metrics = ppo_clip(
        policy,
        torch.full((2,), proximal),
        torch.full((2,), advantage),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
    )
    terms.sum().backward()
    assert (
        torch.isfinite(terms).all()
        and torch.isfinite(policy.grad).all()
        and np.isfinite(list(metrics.values())).all()
    )
    assert not policy.grad.any()
