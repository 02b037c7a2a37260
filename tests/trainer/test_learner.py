"""One optimizer step over many microbatches: sums, skipped updates, and a model that runs its new
weights."""

import math
from itertools import count

import numpy as np
import pytest
import torch

from tandem.model.forward import batch_logprobs
from tandem.plugins.offline.supervised import sft_step
from tandem.types import SamplingDistribution
from tests.support.episodes import bits, recorded, trained
from tests.support.tiny import (
    exact_logits,
    exact_model,
    random_tokens,
    stock_logits,
    stock_model,
    tiny_config,
)
from tests.support.updates import microbatches


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
    learner, batches = recorded(exact_model("qwen3")), microbatches()
    tokens = sum(len(batch.targets) for batch in batches)
    numbers = sum(range(len(batches)))
    counts = {"num_loss_tokens": tokens, "skipped_updates": 0.0}
    row = updated(learner, batches)
    assert row == {"tokens": 1.0, "number": numbers / tokens, **counts}
    row = updated(learner, batches, count=4)
    assert row == {"tokens": tokens / 4, "number": numbers / 4, **counts}
    assert len(batches) > 2 and len(learner.optimizer.updates) == 2  # one for all its microbatches


def steep(value):
    """0, the root of 0, whose slope is not finite."""
    return (value - value.detach()).sqrt()


@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize(
    ("bad", "spoil"),
    [
        *[("loss", lambda value, to=to: value + to) for to in (math.nan, math.inf, -math.inf)],
        ("gradient", steep),
    ],
)
def test_microbatch_not_finite_spoils_nothing(where, bad, spoil):
    learner, batches = trained(exact_model("qwen3")), microbatches()
    updated(learner, batches)
    before, at = bits(learner), range(len(batches))[where]
    row = updated(learner, batches, lambda number, v: spoil(v) if number == at else v)
    assert row["skipped_updates"] == 1.0
    assert [name for name in row if name.startswith("bad/")] == [f"bad/{bad}"]
    parameters = learner.model.module.parameters()
    assert bits(learner) == before and all(p.grad is None for p in parameters)
    assert updated(learner, batches)["skipped_updates"] == 0.0 and bits(learner) != before


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_model_runs_new_weights_after_an_update_not_a_stale_pack(kind):
    learner = trained(exact_model(kind))
    document = random_tokens(np.random.default_rng(5), 30)
    for _ in range(2):
        with torch.no_grad():
            [before] = exact_logits(learner.model, [document])
        sft_step(learner, microbatches())
        with torch.no_grad():
            [after] = exact_logits(learner.model, [document])
            fresh = stock_logits(
                stock_model(tiny_config(kind), learner.model.named_weights(), seed=9), document
            )
        assert (after - before).abs().max() > 1e-2
        torch.testing.assert_close(after, fresh, rtol=0, atol=1e-5)
