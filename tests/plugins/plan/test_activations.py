"""The arithmetic of `tandem plan` for activations, against what autograd keeps in a forward
pass."""

import numpy as np
import pytest
import torch

from tandem.model.forward import batch_logprobs
from tandem.model.load import make_exact
from tandem.plugins.plan.shards import _layer_bytes, activation_bytes
from tandem.trainer.pack import pack
from tandem.types import SamplingDistribution
from tests.support.architectures import exact
from tests.support.tiny import make_sample, random_tokens, stock_model, tiny_config

TOKENS = 512


def logprobs_of(model):
    tokens = random_tokens(np.random.default_rng(0), TOKENS + 1)
    [batch] = pack([make_sample(tokens, np.arange(TOKENS + 1) > 0)], 1 << 20)
    known = -torch.ones(TOKENS)
    return batch_logprobs(model, batch, SamplingDistribution(), known, entropy=False)[0]


def kept_bytes(model):
    """Bytes of the storages that a forward pass saves, each counted once, but for weights and their
    packs."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def save(tensor):
        if not tensor.is_mkldnn and (at := tensor.untyped_storage()).data_ptr() not in weights:
            kept[at.data_ptr()] = (at.nbytes(), tensor)  # a tensor that lives keeps its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        logprobs_of(model)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe"])
def test_activations_are_what_autograd_keeps(kind, dtype):
    config = tiny_config(kind, num_hidden_layers=3, vocab_size=97)
    model = make_exact(stock_model(config).to(dtype))
    found = kept_bytes(model)
    # a second pass: packs are there, and the bytes of packing are none of autograd's
    assert found == kept_bytes(model)
    expected = activation_bytes(config, TOKENS, dtype, checkpointing=False)
    assert expected == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpointing_keeps_the_inputs_of_layers_and_runs_one_again(dtype):
    config = tiny_config("qwen3", num_hidden_layers=3)
    model = make_exact(stock_model(config).to(dtype))
    model.checkpointing = True
    again = TOKENS * _layer_bytes(config, 0, dtype.itemsize, whole=True)
    rotation = TOKENS * 2 * dtype.itemsize * config.head_dim  # which no layer has saved yet
    expected = activation_bytes(config, TOKENS, dtype, checkpointing=True) - again - rotation
    assert expected == pytest.approx(kept_bytes(model), rel=0.05)


def test_a_frozen_output_projection_keeps_no_gradient():
    config = tiny_config("qwen3")
    sizes = [
        activation_bytes(config, TOKENS, torch.float32, checkpointing=False, head=head)
        for head in (True, False)
    ]
    assert sizes[0] - sizes[1] == 4 * config.vocab_size * config.hidden_size


@pytest.mark.parametrize("name", ["gemma3_text", "phi", "gpt2", "apertus"])
def test_activations_of_transformers_layers_have_a_bound(name):
    model = exact(name)
    found = kept_bytes(model)
    expected = activation_bytes(model.config, TOKENS, torch.float32, checkpointing=False)
    assert found <= expected <= 3 * found
