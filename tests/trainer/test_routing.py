"""Statistics of routers, and the loss that balances their experts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.model.forward import batch_logprobs
from tandem.trainer.pack import pack
from tandem.trainer.routing import routing_metrics, routing_of
from tests.support.episodes import recorded
from tests.support.tiny import exact_model, make_sample, random_tokens, twins
from tests.support.updates import SAMPLING, microbatches


def updated(model, batches, coef=0.0, scale=1.0):
    """The metrics and gradients of one update."""
    learner = replace(recorded(model), router_aux_loss_coef=coef)

    def loss(batch):
        logprobs, _ = batch_logprobs(model, batch, SAMPLING)
        return -logprobs.sum() * scale, {"tokens": float(len(logprobs))}

    return learner.update(batches, loss), learner.optimizer.updates[0]


def test_statistics_of_two_layers():
    even = torch.stack([torch.arange(4.0).roll(n) for n in range(4)])
    certain = torch.tensor([[50.0, 49.0, 0.0, 0.0]]).expand(4, -1)
    layers = [logits.softmax(-1) for logits in (even, certain)]
    found = routing_metrics([routing_of(p, p.topk(2, -1).indices) for p in layers], 4)
    entropy = [torch.distributions.Categorical(logits=x).entropy().mean() for x in (even, certain)]
    assert found["router/max_load"] == (1 + 2) / 2 and found["router/unused"] == (0 + 0.5) / 2
    assert found["router/entropy"] == pytest.approx(float(sum(entropy)) / 2, rel=1e-6)


def test_update_of_a_mixture_of_experts_reports_means_over_its_tokens():
    model = exact_model("qwen3_moe")
    batches = microbatches()
    (row, _), sizes = updated(model, batches), [len(b.tokens) for b in batches]
    parts = [updated(exact_model("qwen3_moe"), [batch])[0] for batch in batches]
    for name in ("router/max_load", "router/entropy", "router/unused"):
        mean = np.average([part[name] for part in parts], weights=sizes)
        assert row[name] == pytest.approx(mean, rel=1e-12)
    assert len(set(sizes)) > 1 and "router/aux_loss" not in row


@pytest.mark.parametrize("checkpointing", [False, True])
def test_balance_loss_of_an_update_is_that_of_stock_with_its_gradient(checkpointing):
    model, stock = twins("qwen3_moe")
    model.checkpointing = checkpointing
    tokens = random_tokens(np.random.default_rng(0), 38)  # their rows are padded to 40
    batches = pack([make_sample(tokens, np.arange(38) > 3)], 60)
    row, grads = updated(model, batches, coef=0.5, scale=0.0)
    inputs = torch.from_numpy(tokens[None, :-1])
    out = stock(input_ids=inputs, output_router_logits=True, use_cache=False)
    (0.5 * out.aux_loss).backward()
    assert row["router/aux_loss"] == pytest.approx(float(out.aux_loss.detach()), rel=1e-5)
    for name, parameter in stock.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-7)
    assert grads["model.layers.1.mlp.gate.weight"].any()


def test_balance_loss_adds_the_mean_gradient_over_tokens_and_changes_no_other_metric():
    batches = microbatches()
    (plain, before), (row, after) = (
        updated(exact_model("qwen3_moe"), batches, coef) for coef in (0.0, 0.1)
    )
    sizes = [len(batch.tokens) for batch in batches]
    parts = [updated(exact_model("qwen3_moe"), [b], 0.1, scale=0.0)[1] for b in batches]
    assert {**row, "router/aux_loss": 0} == {**plain, "router/aux_loss": 0}
    for name, gradient in after.items():
        own = sum(size * part[name] for size, part in zip(sizes, parts, strict=True)) / sum(sizes)
        torch.testing.assert_close(gradient - before[name], own, rtol=1e-3, atol=1e-5)
    assert (
        after["model.layers.1.mlp.gate.weight"] - before["model.layers.1.mlp.gate.weight"]
    ).abs().max() > 1e-3
