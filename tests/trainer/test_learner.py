"""One optimizer step over many microbatches: sums, skipped updates, and a model that runs its new
weights."""

import math
from itertools import count

import numpy as np
import pytest
import torch

from tandem.model.forward import batch_logprobs
from tandem.plugins.offline.supervised import sft_step
from tandem.trainer.pack import pack
from tandem.types import SamplingDistribution
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


def updated(learner, batches, spoil=None, **divisor):
    """One update on -log p summed; spoil changes the loss of a microbatch by its number."""
    numbers = count()

    def loss(batch):
        logprobs, _ = batch_logprobs(learner.model, batch, SamplingDistribution())
        loss, at = -logprobs.sum(), next(numbers)
        metrics = {"tokens": float(len(logprobs)), "number": float(at)}
        return spoil(at, loss) if spoil else loss, metrics

    return learner.update(batches, loss, **divisor)


def test_metrics_are_sums_over_microbatches_divided_by_the_count():
    learner, batches = recorded(exact_model("qwen3")), batches_of()
    tokens = sum(len(batch.targets) for batch in batches)
    numbers = sum(range(len(batches)))
    counts = {"num_loss_tokens": tokens, "skipped_updates": 0.0}
    row = updated(learner, batches)
    assert row == {"tokens": 1.0, "number": numbers / tokens, **counts}
    row = updated(learner, batches, count=4)
    assert row == {"tokens": tokens / 4, "number": numbers / 4, **counts}
    assert len(batches) > 2 and len(learner.optimizer.updates) == 2  # one for all its microbatches


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, -1])
def test_microbatch_loss_not_finite_spoils_nothing(bad, where):
    learner, batches = trained(exact_model("qwen3")), batches_of()
    updated(learner, batches)
    before, at = bits(learner), range(len(batches))[where]
    row = updated(learner, batches, lambda number, v: v + bad if number == at else v)
    assert row["bad/loss"] == row["skipped_updates"] == 1.0 and "bad/gradient" not in row
    assert bits(learner) == before and all(
        p.grad is None for p in learner.model.module.parameters()
    )
    assert updated(learner, batches)["skipped_updates"] == 0.0 and bits(learner) != before


def test_gradient_not_finite_spoils_nothing():
    learner, batches = trained(exact_model("qwen3")), batches_of()
    before = bits(learner)

    def steep(number, value):  # the root of 0 is 0, and its slope is not finite
        return (value - value.detach()).sqrt() if number == 1 else value

    row = updated(learner, batches, steep)
    assert row["bad/gradient"] == row["skipped_updates"] == 1.0 and "bad/loss" not in row
    assert bits(learner) == before and all(
        p.grad is None for p in learner.model.module.parameters()
    )


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_model_runs_new_weights_after_an_update_not_a_stale_pack(kind):
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
