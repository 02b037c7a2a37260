"""Loading of models, refusals by name before any weight is read, and logits against stock
transformers."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tandem.model.attention import PackedPlan
from tandem.model.config_file import check_model
from tandem.model.load import load_model, make_exact
from tandem.model.lora import Lora
from tandem.model.paths import divisible
from tandem.run_folder.export import export
from tandem.runtime.errors import UserError
from tests.support.architectures import save_architecture
from tests.support.tiny import (
    CONFIGS,
    change_json,
    exact_logits,
    exact_model,
    random_tokens,
    same_weights,
    save_model,
    stock_logits,
    stock_model,
    tiny_config,
    twins,
)

LENGTHS = (1, 2, 17, 40)


def documents(seed=0):
    rng = np.random.default_rng(seed)
    return [random_tokens(rng, n) for n in LENGTHS]


def with_rope(kind, **others):
    values = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, **others}
    return {"rope_parameters": {**values, "original_max_position_embeddings": 32}}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {}) for kind in CONFIGS),
        ("llama", with_rope("linear")),
        ("llama", with_rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
        ("llama", with_rope("yarn")),
    ],
)
def test_packed_logits_are_transformers_document_by_document(kind, changes):
    exact, stock = twins(kind, **changes)
    assert divisible(exact.config)
    with torch.no_grad():
        for found, document in zip(exact_logits(exact, documents()), documents(), strict=True):
            # two implementations of a float32 model, logits of order 1 to 10
            torch.testing.assert_close(found, stock_logits(stock, document), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_keep_their_hugging_face_names_once_each(kind):
    exact, stock = twins(kind)
    named = exact.named_weights()
    assert list(named) == [name for name, _ in stock.named_parameters()]
    assert all(torch.equal(named[name], p) for name, p in stock.named_parameters())
    assert ("lm_head.weight" in named) == (not exact.config.tie_word_embeddings)


def test_a_saved_directory_loads_with_the_same_bits_in_float32(tmp_path):
    model = exact_model("qwen3")
    model.module.save_pretrained(tmp_path)
    assert same_weights(load_model(str(tmp_path)), model)
    stock_model(tiny_config("qwen3")).bfloat16().save_pretrained(tmp_path / "half")
    half = load_model(str(tmp_path / "half")).named_weights()
    assert {weight.dtype for weight in half.values()} == {torch.float32}


def test_loading_weights_keeps_the_tensors_and_their_ties():
    model, other = exact_model("qwen3", seed=0), exact_model("qwen3", seed=1)
    places = {name: w.data_ptr() for name, w in model.named_weights().items()}
    model.load_weights(other.named_weights())
    assert {name: w.data_ptr() for name, w in model.named_weights().items()} == places
    assert model.head.weight is model.module.get_input_embeddings().weight
    assert same_weights(model, other)


def test_load_weights_partial_or_unknown_names():
    model, other = exact_model("llama", seed=0), exact_model("llama", seed=1)
    before = {name: w.clone() for name, w in model.named_weights().items()}
    name = "model.layers.1.mlp.up_proj.weight"
    new = other.named_weights()[name]
    for wrong, size in (("model.norm.bias", 96), ("model.norm.weight", 1)):
        with pytest.raises(UserError, match="not this model's") as error:
            model.load_weights({name: new, wrong: torch.ones(size)})
        assert error.value.where == wrong and error.value.found.startswith("1 of 2 names")
        assert torch.equal(model.named_weights()[name], before[name])
    model.load_weights({name: new})
    assert [n for n, w in model.named_weights().items() if not torch.equal(w, before[n])] == [name]
    assert torch.equal(model.named_weights()[name], new)


class CountingPlan:
    """A packed plan that counts the layers that attend through it."""

    def __init__(self, length):
        self.inner, self.layers = PackedPlan(np.array([[0, length, 0, 0]]), group=3, kv_heads=2), []

    def attend(self, layer, *rest):
        self.layers.append(layer)
        return self.inner.attend(layer, *rest)


def gradients_of(model, *, checkpointing, off=nullcontext):
    """(gradients by name, the layers that were run, in order) of a packed pass of 30 tokens;
    backward outside of off."""
    model.checkpointing, plan = checkpointing, CountingPlan(30)
    model.zero_grad()
    tokens = torch.from_numpy(random_tokens(np.random.default_rng(0), 30))
    with off():
        out = model.head(model.hidden(tokens, torch.arange(30), plan))
    out.log_softmax(-1)[:, 3].sum().backward()
    grads = {
        name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None
    }
    return grads, plan.layers


@pytest.mark.parametrize(
    "lora", [None, Lora(rank=4, alpha=8.0, targets=("all-linear",), seed=0)], ids=["full", "lora"]
)
@pytest.mark.parametrize("kind", CONFIGS)
def test_checkpointing_runs_layers_twice_with_equal_gradients(kind, lora):
    model = make_exact(stock_model(tiny_config(kind)), lora)
    model.load_weights({name: w + 0.1 for name, w in model.adapter_weights().items()})
    plain, once = gradients_of(model, checkpointing=False)
    checkpointed, twice = gradients_of(model, checkpointing=True)
    assert (once, twice) == ([0, 1], [0, 1, 1, 0])
    assert plain.keys() == checkpointed.keys() == model.trainable().keys()
    assert all(torch.equal(grad, checkpointed[name]) for name, grad in plain.items())


def test_checkpointing_with_adapter_off_repeats_it_off():
    model = make_exact(
        stock_model(tiny_config()), Lora(rank=4, alpha=8.0, targets=("q_proj",), seed=0)
    )
    model.load_weights({name: w + 0.1 for name, w in model.adapter_weights().items()})
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    plain, _ = gradients_of(model, checkpointing=False, off=model.adapter_off)
    checkpointed, _ = gradients_of(model, checkpointing=True, off=model.adapter_off)
    assert plain.keys() == checkpointed.keys() and not any("lora" in name for name in plain)
    assert all(torch.equal(grad, checkpointed[name]) for name, grad in plain.items())
    adapted, _ = gradients_of(model, checkpointing=True)
    assert not torch.equal(plain["model.norm.weight"], adapted["model.norm.weight"])


def test_checkpoint_lacking_a_tensor_refused(tmp_path):
    exact_model("qwen3").module.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="cannot be loaded") as error:
        load_model(str(tmp_path))
    assert "model.layers.1.mlp.up_proj.weight" in error.value.found


def test_old_config_read_as_transformers_reads_it(tmp_path):
    old = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "rope_theta": 500000.0,
        "head_dim": 16,
        "vocab_size": 99,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "torch_dtype": "bfloat16",
        "pretraining_tp": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert check_model(str(tmp_path)).to_dict() == AutoConfig.from_pretrained(
        tmp_path
    ).to_dict() | {"_name_or_path": ""}


def test_what_a_config_says_of_kernels_and_code_is_dropped(tmp_path):
    model = exact_model("llama")
    model.module.save_pretrained(tmp_path)
    code = {
        "_attn_implementation": "elsewhere/kernel",
        "attn_implementation": "elsewhere/kernel",
        "_experts_implementation": "elsewhere/kernel",
        "auto_map": {"AutoModelForCausalLM": "modeling_x.Model"},
        "transformers_weights": "../elsewhere.safetensors",
        "fusion_config": {"a": 1},
        "distributed_config": {"tp_size": 2},
    }
    change_json(tmp_path / "config.json", **code)
    loaded = load_model(str(tmp_path))
    assert "elsewhere" not in str(vars(loaded.config))
    assert loaded.config.to_dict().keys() <= model.config.to_dict().keys()
    assert same_weights(loaded, model)


def quantized_again(folder, values, change):
    """Replace the tensors of a directory by change(name, tensor), names and tensors, and name the
    quantizer."""
    weights = load_file(folder / "model.safetensors")
    save_file(
        {new: t for name, weight in weights.items() for new, t in change(name, weight).items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    change_json(folder / "config.json", quantization_config=values)


def to_fp8(name, weight):
    """In blocks of 128 x 128, each with a scale; 0.25, so that a scale that is not used shows."""
    if not name.endswith("_proj.weight"):
        return {name: weight}
    scales = torch.full([-(-size // 128) for size in weight.shape], 0.25)
    return {name: (weight * 4).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def to_mxfp4(name, weight):
    """Experts of 1s, 0.5 x 2: two numbers a byte, and an exponent for 32 of them."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: weight}
    experts, inputs, outputs = weight.shape
    shape = experts, outputs, inputs // 32
    return {
        f"{name}_blocks": torch.full((*shape, 16), 0x11, dtype=torch.uint8),
        f"{name}_scales": torch.full(shape, 128, dtype=torch.uint8),
    }


def test_fp8_checkpoint_runs_and_is_exported_dequantized(tmp_path):
    source = stock_model(tiny_config("llama", hidden_size=96, head_dim=16))
    save_model(source, tmp_path / "fp8")
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    quantized_again(tmp_path / "fp8", fp8, to_fp8)
    model = load_model(str(tmp_path / "fp8"))
    for name, weight in model.named_weights().items():
        expected = source.state_dict()[name]
        if name.endswith("_proj.weight"):
            expected = (expected * 4).to(torch.float8_e4m3fn).float() / 4
        assert torch.equal(weight, expected), name
    again = export(model, str(tmp_path / "fp8"), tmp_path / "out", "")
    assert same_weights(load_model(str(again)), model)


def test_mxfp4_checkpoint_runs_and_is_exported_dequantized(tmp_path):
    save_architecture("gpt_oss", tmp_path / "mxfp4", hidden_size=64, intermediate_size=64)
    quantized_again(tmp_path / "mxfp4", {"quant_method": "mxfp4"}, to_mxfp4)
    model = load_model(str(tmp_path / "mxfp4"))
    experts = [
        w for n, w in model.named_weights().items() if n.endswith(("gate_up_proj", "down_proj"))
    ]
    assert experts and all((weight == 1.0).all() for weight in experts)
    again = export(model, str(tmp_path / "mxfp4"), tmp_path / "out", "")
    assert same_weights(load_model(str(again)), model)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "compressed-tensors", "torchao"])
def test_other_quantized_checkpoints_are_refused_by_name(method, tmp_path):
    tiny_config().save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", quantization_config={"quant_method": method})
    with pytest.raises(UserError, match="weights are quantized") as error:
        check_model(str(tmp_path))
    assert method in error.value.found and "lora.base=nf4" in error.value.next
