"""A base in 4 or 8 bits under adapters: its numbers, its memory, and that engine, trainer, exports
and a resumed run have the bits of a float model with those numbers."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tandem.cli.train import train
from tandem.jobs.models import build_model
from tandem.model.load import load_model, make_exact
from tandem.model.lora import Lora
from tandem.model.quantized import NF4, quantize, quantized_bytes
from tandem.run_folder.read import open_past
from tandem.runtime.errors import UserError
from tests.support.architectures import stock
from tests.support.parity import gap_of
from tests.support.past_runs import past_run
from tests.support.runs import KINDS, fingerprint
from tests.support.tiny import LORA, exact_logits, moved, random_tokens

BASES = ("nf4", "int8")
KINDS["lora, nf4"] = [*KINDS["lora"], "lora.base=nf4"]


def weight_of(rows=5, inputs=77, seed=0):
    """A weight whose last block is not whole, and with a row and a block of zeros."""
    weight = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))
    weight[2] = 0.0
    return weight


def test_nf4_is_the_nearest_level_of_each_number_in_blocks_of_64():
    weight = weight_of()
    found = quantize(weight, "nf4").numbers().reshape(-1)
    for first in range(0, weight.numel(), 64):
        block = weight.reshape(-1)[first : first + 64]
        levels = NF4 * block.abs().max()
        nearest = (block[:, None].double() - levels.double()).abs().argmin(1)
        assert torch.equal(found[first : first + 64], levels[nearest])


def test_int8_is_the_nearest_of_255_levels_of_each_row():
    weight = weight_of()
    apart = (quantize(weight, "int8").numbers() - weight).abs()
    assert (apart <= weight.abs().amax(1, keepdim=True) / 127 * 0.5001).all()
    assert apart.any() and not apart[2].any()


@pytest.mark.parametrize("base", BASES)
def test_quantized_weight_is_its_numbers_in_its_bytes(base):
    weight = weight_of(64, 96)
    once = quantize(weight, base)
    numbers = once.numbers()
    again = quantize(numbers, base)
    assert torch.equal(again.codes, once.codes) and torch.equal(again.numbers(), numbers)
    held = once.codes.nbytes + once.scales.nbytes
    assert held == quantized_bytes(weight, base) < weight.nbytes * (0.15 if base == "nf4" else 0.27)
    x = torch.randn(3, 96)
    assert torch.equal(x @ once.t(), x @ numbers.t())
    assert torch.equal(once.bfloat16(), numbers.bfloat16())
    with pytest.raises(TypeError, match="would change a quantized weight"):
        once.mul_(2.0)


def with_numbers_of(model, base):
    """Replace the weights of the layers' linears in place by the numbers of quantized ones."""
    for part in model.base_model.modules():
        if isinstance(part, nn.Linear):
            part.weight.data = quantize(part.weight, base).numbers()
    return model


def pair(name, base):
    """(on a quantized base, on the float base of its numbers), with the same moved adapters."""
    models = [
        make_exact(stock(name), replace(LORA, base=base)),
        make_exact(with_numbers_of(stock(name), base), LORA),
    ]
    return [moved(model) for model in models]


def out(model):
    random = np.random.default_rng(3)
    return torch.cat(exact_logits(model, [random_tokens(random, n) for n in (1, 30, 7)]))


# of the lean layer, with experts, and of the general path
@pytest.mark.parametrize(
    ("name", "base"), [("qwen3", "nf4"), ("llama", "int8"), ("qwen3_moe", "nf4"), ("olmo2", "nf4")]
)
def test_logits_and_gradients_are_those_of_a_float_base_with_the_same_numbers(name, base):
    quantized, plain = pair(name, base)
    for model in (quantized, plain):
        model.checkpointing = True
        out(model).pow(2).sum().backward()
    with torch.no_grad():
        assert torch.equal(out(quantized), out(plain))
        with quantized.adapter_off(), plain.adapter_off():
            assert torch.equal(out(quantized), out(plain))
    for name, weight in quantized.trainable().items():
        assert torch.equal(weight.grad, plain.trainable()[name].grad), name
    assert {n for n, p in quantized.module.named_parameters() if p.grad is not None} == set(
        quantized.trainable()
    )
    merged, expected = quantized.merged_weights(), plain.merged_weights()
    assert list(merged) == list(expected)
    for key, weight in merged.items():
        assert type(weight) is torch.Tensor and torch.equal(weight, expected[key]), key


@pytest.mark.parametrize(
    ("name", "base"), [("llama", "nf4"), ("olmo2", "int8"), ("llama in bfloat16", "nf4")]
)
def test_engine_equals_trainer_on_a_quantized_base(name, base):
    kind, _, half = name.partition(" in ")
    module = stock(kind).bfloat16() if half else stock(kind)
    model = moved(make_exact(module, replace(LORA, base=base)))
    assert all(weight.dtype == model.dtype for weight in model.merged_weights().values())
    assert gap_of(model) == 0.0


def test_model_without_linears_that_can_be_quantized_is_refused():
    lora = Lora(rank=2, alpha=2.0, targets=("all-linear",), seed=0, base="nf4")
    with pytest.raises(UserError, match="no linear whose base"):
        make_exact(stock("gpt2"), lora)


# ---- runs


@pytest.fixture(scope="module")
def finished():
    return past_run("lora, nf4")


def test_resumed_run_has_the_bits_of_one_never_stopped(finished, tmp_path):
    run = shutil.copytree(finished.parent, tmp_path / "again") / "run"
    shutil.rmtree(run / "checkpoints" / "step_000004")
    shutil.rmtree(run / "hf")
    past = open_past(run)
    train("train", past.config.model_copy(update={}), run)
    assert fingerprint(run) == fingerprint(finished)


def test_export_is_the_merged_model_and_its_card_names_the_base(finished):
    [folder] = (finished / "hf").iterdir()
    config = open_past(finished).config
    model = build_model(config, config.model.path)
    saved = finished / "checkpoints" / "step_000004" / "policy.safetensors"
    model.load_weights(load_file(saved))
    exported = load_model(str(folder))
    expected = model.merged_weights()
    for name, weight in exported.named_weights().items():
        assert torch.equal(weight, expected[name]), name
    assert "linears of its layers in nf4" in (folder / "README.md").read_text()
