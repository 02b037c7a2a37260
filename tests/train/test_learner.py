"""One optimizer step over many microbatches: sums, skipped updates, and a model that runs its new
weights."""

import math

import numpy as np
import pytest
import torch

from tandem.model.forward import batch_logprobs
from tandem.model.logprobs import SamplingDistribution
from tandem.train.pack import pack
from tandem.train.supervised import sft_step
from tests.support.episodes import bits, recorded, trained
from tests.support.tiny import (
    exact_logits,
    exact_model,
    random_samples,
    random_tokens,
    stock_logits,
    stock_model,
    tiny_config,
)


def batches_of(budget=60):
    return pack(random_samples(np.random.default_rng(5), 4), budget)


def likelihood(learner, spoil=None):
    """-log p summed; spoil changes the value of a microbatch by its number."""

    def loss(index, batch):
        logprobs, _ = batch_logprobs(learner.model, batch, SamplingDistribution())
        value = -logprobs.sum()
        return spoil(index, value) if spoil else value, {
            "tokens": float(len(logprobs)),
            "number": float(index),
        }

    return loss


def test_metrics_are_sums_over_all_microbatches_divided_by_the_tokens_or_by_what_is_counted():
    learner, batches = recorded(exact_model("qwen3")), batches_of()
    tokens = sum(len(batch.targets) for batch in batches)
    numbers = sum(range(len(batches)))
    row = learner.update(batches, likelihood(learner))
    assert row == {
        "tokens": 1.0,
        "number": numbers / tokens,
        "num_loss_tokens": tokens,
        "skipped_updates": 0.0,
    }
    row = learner.update(batches, likelihood(learner), count=4)
    assert row == {
        "tokens": tokens / 4,
        "number": numbers / 4,
        "num_loss_tokens": tokens,
        "skipped_updates": 0.0,
    }


def test_every_microbatch_is_asked_for_once_under_its_number():
    learner, batches, asked = recorded(exact_model("qwen3")), batches_of(), []
    plain = likelihood(learner)

    def loss(index, batch):
        asked.append(batches[index] is batch)
        return plain(index, batch)

    learner.update(batches, loss)
    assert (
        asked == [True] * len(batches) and len(batches) > 2 and len(learner.optimizer.updates) == 1
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, -1])
def test_a_microbatch_with_a_loss_that_is_not_finite_spoils_nothing(bad, where):
    learner, batches = trained(exact_model("qwen3")), batches_of()
    learner.update(batches, likelihood(learner))
    before, at = bits(learner), range(len(batches))[where]
    row = learner.update(
        batches, likelihood(learner, lambda index, v: v + bad if index == at else v)
    )
    assert row["bad/loss"] == row["skipped_updates"] == 1.0 and "bad/gradient" not in row
    assert bits(learner) == before and all(
        p.grad is None for p in learner.model.module.parameters()
    )
    assert (
        learner.update(batches, likelihood(learner))["skipped_updates"] == 0.0
        and bits(learner) != before
    )


def test_a_gradient_that_is_not_finite_spoils_nothing():
    learner, batches = trained(exact_model("qwen3")), batches_of()
    before = bits(learner)
    steep = likelihood(
        learner, lambda index, value: (value - value.detach()).sqrt() if index == 1 else value
    )
    row = learner.update(batches, steep)  # the root of 0 is 0, and its slope is not finite
    assert row["bad/gradient"] == row["skipped_updates"] == 1.0 and "bad/loss" not in row
    assert bits(learner) == before and all(
        p.grad is None for p in learner.model.module.parameters()
    )


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_after_an_update_the_model_runs_its_new_weights_and_not_a_stale_pack(kind):
    learner = trained(exact_model(kind))
    document = random_tokens(np.random.default_rng(5), 30)
    for _ in range(2):
        with torch.no_grad():
            [before] = exact_logits(learner.model, [document])
        sft_step(learner, batches_of())
        with torch.no_grad():
            [after] = exact_logits(learner.model, [document])
            fresh = stock_logits(
                stock_model(tiny_config(kind), learner.model.named_weights(), seed=9), document
            )
        assert (after - before).abs().max() > 1e-2
        torch.testing.assert_close(after, fresh, rtol=0, atol=1e-5)


def test_loading_weights_renews_the_packs_too():
    model, other = exact_model("qwen3", seed=0), exact_model("qwen3", seed=1)
    document = random_tokens(np.random.default_rng(0), 20)
    with torch.no_grad():
        exact_logits(model, [document])
        model.load_weights(other.named_weights())
        assert torch.equal(exact_logits(model, [document])[0], exact_logits(other, [document])[0])
