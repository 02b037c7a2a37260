"""Models that cannot be exact: packed rows have the states of separate passes of transformers, and
its gradients."""

import numpy as np
import pytest
import torch
from transformers import FalconConfig, MambaConfig

from tandem.model.config_file import check_model
from tandem.model.forward import batch_logprobs
from tandem.model.lora import Lora
from tandem.model.trial import StockTrial, stock_trial
from tandem.runtime.errors import UserError
from tandem.trainer.pack import pack
from tandem.types import SamplingDistribution
from tests.support.architectures import INEXACT, architecture, by_need, inexact, stock, why_inexact
from tests.support.tiny import random_samples, stock_logits, tiny_config


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


@pytest.mark.parametrize("name", by_need(INEXACT))
def test_log_probs_and_gradients_are_those_of_separate_passes(name):
    """Sums in another order are all that may differ."""
    samples = random_samples(np.random.default_rng(4), 3)
    model, twin = inexact(name), stock(name)
    for batch in pack(samples, 400):
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


def test_adapters_that_peft_refuses_are_named():
    with pytest.raises(UserError, match="PEFT makes no adapter") as error:
        inexact("mamba2", Lora(rank=4, alpha=8.0, targets=("all-linear",), seed=7))
    assert "out_proj" in error.value.found
