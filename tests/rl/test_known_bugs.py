"""Failures of other trainers with filtered or tempered distributions, each as the right number
beside the one that the bug gives."""

import math

import numpy as np
import pytest
import torch

from tandem.model.kernels import CPU
from tandem.model.logprobs import Head, log_distribution, token_logprobs
from tandem.rl.corrections import correction
from tandem.rl.losses import ppo_clip
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
    return token_logprobs(Head(rows, weight, CPU.pack(weight)), targets, how)[0].view(
        len(logits), VOCABULARY
    )


def mean_ratio(engine, trainer):
    """[4]: the expectation of trainer / engine over what the engine samples: all tokens by their
    weight, so no noise."""
    return torch.where(engine.isinf(), 0.0, engine.exp() * (trainer - engine).exp()).sum(-1)


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
        Head(hidden, weight, CPU.pack(weight)), targets, SamplingDistribution(temperature=0.5)
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
    policy, _ = token_logprobs(Head(hidden, weight, CPU.pack(weight)), torch.tensor([1]), how)
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
