"""Failures of other trainers, each as the right number beside the one that the bug gives."""

import math

import numpy as np
import pytest
import torch

from tandem.model.cpu_kernels import CPU
from tandem.model.logprobs import log_distribution, token_logprobs
from tandem.rl.advantages import centred, grpo
from tandem.rl.aggregation import sequence_weights
from tandem.rl.corrections import correction
from tandem.rl.kl import kl_estimate
from tandem.rl.losses import cispo, gspo, ppo_clip
from tandem.rl.returns import gae
from tandem.types import SamplingDistribution

VOCABULARY = 40
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
LOGITS = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2


def engine_table(how, logits=LOGITS):
    """[4, V]: the log-probs that the engine samples from."""
    return log_distribution(logits, how)


def trainer_table(how, logits=LOGITS):
    """[4, V]: the trainer's log-prob of every token, each asked for as if it had been sampled; the
    head is the identity."""
    rows, weight = logits.repeat_interleave(VOCABULARY, 0), torch.eye(VOCABULARY)
    targets = torch.arange(VOCABULARY).repeat(len(logits))
    return token_logprobs(rows, weight, CPU.pack(weight), targets, how)[0].view(
        len(logits), VOCABULARY
    )


def mean_ratio(engine, trainer):
    """[4]: the expectation of trainer / engine over what the engine samples: all tokens by their
    weight, so no noise."""
    return torch.where(engine.isinf(), 0.0, engine.exp() * (trainer - engine).exp()).sum(-1)


# --- ratios


def test_sequence_ratio_is_a_mean_and_not_a_sum():
    """TRL #5814: 0.569 in place of 0.993 for 80 tokens, below the clip range and so without a
    gradient."""
    policy = torch.full((80,), math.log(0.569) / 80, requires_grad=True)
    proximal, advantages, sequences = (
        torch.zeros(80),
        -torch.ones(80),
        torch.zeros(80, dtype=torch.int64),
    )
    terms, metrics = gspo(policy, proximal, advantages, sequences, **CLIP)
    terms.mean().backward()
    assert metrics["ratio"] / 80 == pytest.approx(0.993, abs=5e-4)
    assert metrics["clip_share"] == 0
    assert policy.grad.tolist() == pytest.approx([0.993 / 80] * 80, rel=1e-3)
    bug = policy.detach().sum().exp().item()
    assert bug == pytest.approx(0.569) and bug < 1 - CLIP["clip_low"]


def test_importance_ratio_under_top_p_has_mean_1():
    """TRL #6789: the engine's probabilities are those of the kept tokens, the trainer's those of
    all."""
    how = SamplingDistribution(top_p=0.85)
    engine = engine_table(how)
    assert engine.isinf().any(-1).all()
    kept = torch.where(engine.isinf(), 0.0, LOGITS.softmax(-1)).sum(-1)
    torch.testing.assert_close(mean_ratio(engine, trainer_table(how)), torch.ones(4))
    bug = mean_ratio(engine, trainer_table(SamplingDistribution()))
    torch.testing.assert_close(bug, kept)
    assert bug.max() < 0.95


@pytest.mark.parametrize(
    "how",
    [
        SamplingDistribution(top_p=0.85),
        SamplingDistribution(top_k=5),
        SamplingDistribution(min_p=0.2),
        SamplingDistribution(temperature=0.7),
        SamplingDistribution(temperature=1.4),
    ],
    ids=str,
)
def test_correction_is_1_when_engine_and_trainer_filter_alike(how):
    engine, trainer = engine_table(how), trainer_table(how)
    sampled = ~engine.isinf()
    before, now = engine[sampled], trainer[sampled]
    sequences = torch.zeros(len(now), dtype=torch.int64)
    for kind in ("decoupled", "tis", "icepop"):
        weights = correction(kind, now, before, sequences, low=0.99, cap=1.01)
        torch.testing.assert_close(weights, torch.ones(len(now)))
    bug = correction(
        "icepop",
        trainer_table(SamplingDistribution())[sampled],
        before,
        sequences,
        low=0.99,
        cap=1.01,
    )
    assert (bug == 0).float().mean() > 0.5  # most tokens are thrown away, and no weight has moved


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_logprobs_of_the_sampling_temperature_make_first_ratio_1(temperature):
    """TRL #4159: log-probs at temperature 1 of tokens drawn at another: clipped before a single
    update."""
    how = SamplingDistribution(temperature=temperature)
    engine = engine_table(how)
    expected = [[x / temperature for x in row] for row in LOGITS.tolist()]
    normalizers = [math.log(math.fsum(math.exp(x) for x in row)) for row in expected]
    right = [[x - z for x in row] for row, z in zip(expected, normalizers, strict=True)]
    np.testing.assert_allclose(engine, right, atol=1e-5)
    np.testing.assert_allclose(trainer_table(how), right, atol=1e-5)

    def clip_share(trainer):
        """Return the share of clipped ratios, with advantages of both signs, so that both bounds
        count."""
        before = engine.reshape(-1)
        losses = [
            ppo_clip(trainer.reshape(-1), before, a * torch.ones_like(before), **CLIP)
            for a in (1.0, -1.0)
        ]
        return sum(metrics["clip_share"] for _, metrics in losses) / len(before)

    assert clip_share(trainer_table(how)) == 0
    assert clip_share(trainer_table(SamplingDistribution())) > 0.5


def test_logprob_gradient_is_divided_by_the_temperature_too():
    hidden = LOGITS.clone().requires_grad_()
    weight, targets = torch.eye(VOCABULARY), LOGITS.argmax(-1)
    token_logprobs(
        hidden, weight, CPU.pack(weight), targets, SamplingDistribution(temperature=0.5)
    )[0].sum().backward()
    right = (torch.eye(VOCABULARY)[targets] - (LOGITS / 0.5).softmax(-1)) / 0.5
    torch.testing.assert_close(hidden.grad, right)
    assert (hidden.grad - right * 0.5).abs().max() > 0.1


def test_token_moved_out_of_top_p_keeps_ratio_and_gradient():
    """A filter applied blindly gives it probability 0: log-prob -inf, and a NaN where a ratio meets
    its gradient."""
    how = SamplingDistribution(top_k=2)
    before, after = torch.tensor([[2.0, 1.0, 0.9]]), torch.tensor([[2.0, 0.9, 1.0]])
    engine = log_distribution(before, how)[:, 1]
    hidden, weight = after.clone().requires_grad_(), torch.eye(3)
    policy, _ = token_logprobs(hidden, weight, CPU.pack(weight), torch.tensor([1]), how)
    ppo_clip(policy, engine, -torch.ones(1), clip_low=0.9, clip_high=0.9)[0].sum().backward()
    ratio = (
        math.exp(0.9)
        / (math.exp(2) + math.exp(1) + math.exp(0.9))
        * (math.exp(2) + math.exp(1))
        / math.exp(1)
    )
    assert (policy - engine).exp().item() == pytest.approx(ratio, rel=1e-5)
    assert hidden.grad.isfinite().all() and hidden.grad[0, 1] > 0.1
    assert log_distribution(after, how)[0, 1] == -math.inf


def test_kl_in_the_loss_is_not_minimized_by_k1():
    """k1 as a loss: the right value, a gradient that is zero in expectation. k2's is the KL's."""
    logits = LOGITS[0].double().requires_grad_()
    policy, reference = logits.log_softmax(-1), LOGITS[1].double().log_softmax(-1)
    [right] = torch.autograd.grad(
        (policy.exp() * (policy - reference)).sum(), logits, retain_graph=True
    )

    def found(kind):
        estimate = kl_estimate(kind, policy, reference)
        return torch.autograd.grad(
            (policy.exp().detach() * estimate).sum(), logits, retain_graph=True
        )[0]

    torch.testing.assert_close(found("k2"), right)
    assert found("k1").abs().max() < 1e-12 < 0.1 < right.abs().max()


def test_cispo_weight_carries_no_gradient_of_its_own():
    """CISPO without the stop: A r (1 + log p) in place of A r, of the other sign for an unlikely
    token."""
    policy = torch.tensor([-3.0], requires_grad=True)
    terms, _ = cispo(policy, torch.tensor([-3.0]), torch.ones(1), **CLIP)
    terms.sum().backward()
    assert policy.grad.item() == -1.0
    bug = -(policy + 3.0).exp() * policy
    [slope] = torch.autograd.grad(bug.sum(), policy)
    assert slope.item() == pytest.approx(2.0)


# --- sums and means

LENGTHS = np.array([2, 40, 3, 15])
TERMS = [np.random.default_rng(i).normal(loc=i, size=n) for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize(
    "split", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 0], [2, 1]]]
)
def test_microbatches_add_up_however_the_update_is_split(split):
    right = {
        "token_mean": sum(t.sum() for t in TERMS) / LENGTHS.sum(),
        "sequence_mean": sum(t.mean() for t in TERMS) / 4,
        "fixed_length": sum(t.sum() for t in TERMS) / (4 * 50),
    }
    for kind, mean in right.items():
        weights = sequence_weights(kind, LENGTHS, 50)
        parts = [sum(weights[i] * TERMS[i].sum() for i in batch) for batch in split]
        assert sum(parts) == pytest.approx(mean, rel=1e-12)


def test_mean_of_the_means_of_microbatches_is_another_number():
    """Each microbatch divided by its own tokens: a token beside a long sequence counts less than
    one beside a short."""
    right = sum(
        w * t.sum() for w, t in zip(sequence_weights("token_mean", LENGTHS, 50), TERMS, strict=True)
    )
    assert right == pytest.approx(np.concatenate(TERMS).mean(), rel=1e-12)
    halves = [np.concatenate(TERMS[:2]).mean(), np.concatenate(TERMS[2:]).mean()]
    ones = [t.mean() for t in TERMS]
    assert abs(np.mean(halves) - right) > 0.3 and abs(np.mean(ones) - right) > 0.05


def test_long_failure_is_punished_per_token_as_a_short_one():
    """Dr.GRPO's length bias: a mean over each sequence's own length makes a failure of 1,000 tokens
    100 times cheaper a token than one of 10, and so answers grow."""
    lengths = np.array([10, 1000])
    fixed = sequence_weights("fixed_length", lengths, 1000)
    assert fixed[0] == fixed[1] == pytest.approx(1 / 2000)
    bug = sequence_weights("sequence_mean", lengths, 1000)
    assert bug[0] / bug[1] == pytest.approx(100)


def test_nearly_solved_problem_weighs_no_more_than_it_moves():
    """Dr.GRPO's difficulty bias: division by the group's std gives 1 failure in 8 the size 2.65,
    and 4 in 8 the size 1."""
    rewards = np.array([[1.0] * 7 + [0.0], [1.0] * 4 + [0.0] * 4])
    assert np.abs(centred(rewards)).max(1).tolist() == [0.875, 0.5]
    np.testing.assert_allclose(np.abs(grpo(rewards)).max(1), [math.sqrt(7), 1.0], rtol=1e-5)


# --- advantages


def test_group_of_one_has_advantage_0_and_not_nan():
    """The std with G - 1 in the denominator, torch's default, is 0 / 0."""
    assert grpo(np.array([[0.7]])).tolist() == [[0.0]]
    with pytest.warns(UserWarning, match="degrees of freedom"):
        assert torch.tensor([0.7]).std().isnan()


def test_std_of_a_group_of_two_divides_by_two():
    """[1, 0] has std 1/2 and so the advantages 1 and -1; with G - 1 it would be 0.707 and they
    0.707."""
    assert grpo(np.array([[1.0, 0.0]]))[0].tolist() == pytest.approx([1.0, -1.0], rel=1e-5)
    assert 0.5 / torch.tensor([1.0, 0.0]).std().item() == pytest.approx(0.7071, rel=1e-4)


def test_group_without_spread_has_advantage_0_and_not_nan():
    rewards = np.array([[1.0, 1.0, 1.0, 1.0]])
    assert not grpo(rewards).any()
    with np.errstate(invalid="ignore"):
        assert np.isnan((rewards - rewards.mean()) / rewards.std()).all()


def test_last_token_does_not_see_the_next_episodes_value():
    """Packed side by side, V of the following token is another episode's: 1.3775 in place of
    0.5."""
    rewards, values = (
        [np.array([0.0, 1.0]), np.array([0.0, 0.0])],
        [np.array([0.5, 0.5]), np.array([9.0, 9.0])],
    )
    right = [gae(r, v, 1.0, 0.95)[0] for r, v in zip(rewards, values, strict=True)]
    assert right[0].tolist() == pytest.approx([0.475, 0.5])
    bug = gae(np.concatenate(rewards), np.concatenate(values), 1.0, 0.95)[0][:2]
    assert bug[1] == pytest.approx(1.3775)
