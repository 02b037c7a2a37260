"""Models that cannot be exact: packed rows have the states of separate passes of transformers, and
its gradients."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, MambaConfig

from tandem.model.config_file import check_model
from tandem.model.forward import batch_logprobs
from tandem.model.load import load_model
from tandem.model.lora import Lora
from tandem.model.trial import StockTrial, stock_trial
from tandem.run_folder.export import export
from tandem.runtime.errors import UserError
from tandem.trainer.pack import pack
from tandem.types import SamplingDistribution
from tests.support.architectures import (
    INEXACT,
    architecture,
    by_need,
    inexact,
    save_architecture,
    stock,
    why_inexact,
)
from tests.support.tiny import random_samples, random_tokens, stock_logits, tiny_config


@pytest.mark.parametrize("name", by_need(INEXACT))
def test_trial_finds_it_causal_and_its_cache_good(name):
    config = architecture(name)
    assert why_inexact(config).startswith(f"architecture {name}: ")
    assert stock_trial(config) == StockTrial("", caches=True)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(hidden_size=96, num_hidden_layers=1), "mamba: its layers keep a state"),
        (tiny_config("llama", num_attention_heads=24, num_key_value_heads=24), "head size 4"),
        (architecture("qwen3_5_text"), "keep a state from token to token"),
        (
            FalconConfig(hidden_size=96, num_hidden_layers=2, num_attention_heads=6),
            "attention of its own",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reason_is_named(config, reason, tmp_path):
    config.save_pretrained(tmp_path)
    assert reason in why_inexact(check_model(str(tmp_path)))


def groups_packed(budget):
    """Samples of several groups, some with a prompt that they share."""
    samples = random_samples(np.random.default_rng(4), 3)
    return samples, pack(samples, budget)


@pytest.mark.parametrize("name", by_need(INEXACT))
def test_log_probs_and_gradients_are_those_of_separate_passes(name):
    """Sums in another order are all that may differ."""
    samples, batches = groups_packed(400)
    model, twin = inexact(name), stock(name)
    for batch in batches:
        logprobs, _ = batch_logprobs(model, batch, SamplingDistribution())
        logprobs.sum().backward()
        expected = []
        for number in batch.samples:
            tokens = samples[number].tokens
            places = np.flatnonzero(samples[number].loss_mask)
            table = stock_logits(twin, tokens[:-1])[places - 1].log_softmax(-1)
            expected.append(table[range(len(places)), tokens[places]])
        expected = torch.cat(expected)
        expected.sum().backward()
        assert (logprobs - expected).abs().max() <= 2e-5
    gradients = {name: p.grad for name, p in model.module.named_parameters()}
    for weight, parameter in twin.named_parameters():
        found, gradient = gradients[weight], parameter.grad
        assert gradient.abs().max() > 0, weight
        assert (found - gradient).abs().max() <= 1e-3 * gradient.abs().max() + 1e-5, weight


@pytest.mark.parametrize("name", by_need(INEXACT))
def test_checkpointing_changes_no_bit(name):
    _, [batch, *_] = groups_packed(400)
    results = []
    for checkpointing in (False, True):
        model = inexact(name)
        model.checkpointing = checkpointing
        logprobs, _ = batch_logprobs(model, batch, SamplingDistribution())
        logprobs.sum().backward()
        results.append([logprobs.detach(), *(p.grad for p in model.module.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("name", "rank"), [("qwen3_5_text", 4), ("mamba2", 0), ("qwen3_next", 4)])
def test_export_loads_in_transformers(name, rank, tmp_path):
    save_architecture(name, tmp_path / "model")
    lora = Lora(rank=rank, alpha=8.0, targets=("all-linear",), seed=7) if rank else None
    model, noise = load_model(str(tmp_path / "model"), lora), torch.Generator().manual_seed(1)
    assert model.gap
    model.load_weights(
        {n: w + 0.05 * torch.randn(w.shape, generator=noise) for n, w in model.trainable().items()}
    )
    export(model, str(tmp_path / "model"), tmp_path / "out", "# A model\n")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = random_tokens(np.random.default_rng(0), 50) % 90
    plan = model.packed_plan(np.array([[0, 50, 0, 0]]))
    with torch.no_grad():
        found = model.head(model.hidden(torch.from_numpy(tokens), torch.arange(50), plan))
        expected = stock_logits(again, tokens)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert check_model(str(tmp_path / "out")).model_type == name


def test_adapters_that_peft_refuses_are_named():
    with pytest.raises(UserError, match="PEFT makes no adapter") as error:
        inexact("mamba2", Lora(rank=4, alpha=8.0, targets=("all-linear",), seed=7))
    assert "out_proj" in error.value.found
