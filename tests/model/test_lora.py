"""LoRA: engine and trainer share bits, gradients are PEFT's, no pack is stale, and both exports are
read by others."""

import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tandem.config.schema import Config
from tandem.model.load import load_model, make_exact
from tandem.model.lora import Lora
from tandem.plugins.commands.export import export_adapter
from tandem.run_folder.export import export, model_card
from tandem.runtime.errors import UserError
from tandem.trainer.optimizer import Optimizer, Settings
from tests.support.parity import engine_for, largest_gap, random_requests
from tests.support.tiny import (
    LORA,
    exact_logits,
    moved,
    noise,
    random_documents,
    save_model,
    stock_logits,
    stock_model,
    tiny_config,
)

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def stock(kind="llama", **changes):
    """transformers starts biases at zero, where a wrong one would not show."""
    model = stock_model(tiny_config(kind, **changes))
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    return model


def adapted(kind="llama", lora=LORA, *, trained=True, **changes):
    """An exact model with an adapter; trained: B is no longer zero."""
    model = make_exact(stock(kind, **changes), lora)
    return moved(model) if trained else model


def adam(model):
    return Optimizer(model.trainable(), Settings(learning_rate=1e-2, total_steps=9))


@torch.no_grad()
def logits(model):
    return torch.cat(exact_logits(model, random_documents()))


def loss_of(logits):
    """A loss in which every logit counts, each differently."""
    out = torch.cat(logits)
    return (out.log_softmax(-1) * noise(*out.shape, seed=3)).sum()


# ---- P1


@pytest.mark.parametrize("kind", KINDS)
def test_engine_equals_trainer_while_the_adapter_trains(kind):
    model = adapted(kind, trained=False)
    optimizer, engine = adam(model), engine_for(model)
    frozen, seen = make_exact(stock(kind)).named_weights(), []
    for step in range(3):
        requests = random_requests(np.random.default_rng(step), prompts=4, longest=60, group=2)
        completions = engine.generate(requests)
        assert largest_gap(model, requests, completions, 300, gradients=True) == 0.0
        assert largest_gap(model, requests, completions, 5000, gradients=False) == 0.0
        seen.append(logits(model))
        optimizer.update()
    assert all(w.any() for name, w in model.named_weights().items() if "lora_B" in name)
    # the updates did reach the packs
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert all(torch.equal(model.named_weights()[name], w) for name, w in frozen.items())


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_off_gives_the_bits_of_the_plain_model(kind):
    model, plain = adapted(kind), make_exact(stock(kind))
    whole, base = logits(model), logits(plain)
    for _ in range(2):
        with model.adapter_off():
            assert torch.equal(logits(model), base)
            # with gradients on
            assert torch.equal(torch.cat(exact_logits(model, random_documents())).detach(), base)
        assert torch.equal(logits(model), whole) and not torch.equal(whole, base)
    with pytest.raises(ZeroDivisionError), model.adapter_off():
        _ = 1 / 0
    assert torch.equal(logits(model), whole)


def test_only_adapted_linears_keep_a_base_pack():
    model = adapted(lora=Lora(rank=4, alpha=8.0, targets=("q_proj", "o_proj"), seed=0))
    layer = model.module.model.layers[0]
    both = [layer.qkv, layer.self_attn.o_proj]
    logits(model)
    merged = [part.pack._packed for part in both]
    # who never asks for the base does not pay for it
    assert [part.base_pack._packed for part in both] == [None, None]
    with model.adapter_off():
        logits(model)
    base = [part.base_pack._packed for part in both]
    logits(model)
    with model.adapter_off():
        logits(model)
    for part, one, other in zip(both, merged, base, strict=True):
        assert part.pack._packed is one is not None and part.base_pack._packed is other is not None
    others = [layer.gate_up, layer.mlp.down_proj, model.head]
    assert [part.base_pack._packed for part in others] == [None] * 3


def test_an_engine_does_not_mix_the_keys_of_model_and_base():
    model = adapted()
    engine, fresh = engine_for(model), engine_for(make_exact(stock()))
    [request] = random_requests(np.random.default_rng(0), prompts=1, longest=60, group=1)
    before = engine.generate([request])[0].logprobs
    with model.adapter_off():
        base = engine.generate([request])[0].logprobs
    assert np.array_equal(base, fresh.generate([request])[0].logprobs)
    assert np.array_equal(engine.generate([request])[0].logprobs, before)


# ---- weights


@pytest.mark.parametrize("kind", KINDS)
def test_lora_names_are_pefts_and_only_the_adapter_trains(kind):
    model = adapted(kind, trained=False)
    plain = [name for name, _ in stock(kind).named_parameters()]
    base = [name for name in model.named_weights() if "lora" not in name]
    assert base == plain == list(model.merged_weights())
    theirs = inject_adapter_in_model(peft_config(kind), stock(kind))
    names = {name.replace(".default", "") for name in theirs.state_dict() if "lora" in name}
    assert names == model.trainable().keys()
    assert model.adapter_weights().keys() == model.trainable().keys()
    assert len(model.adapted) == 2 * (4 if kind == "qwen3_moe" else 7)
    assert not any(name.startswith("lm_head.lora") for name in model.trainable())


def peft_config(kind):
    targets = (
        ATTENTION if kind == "qwen3_moe" else [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
    )
    return LoraConfig(
        r=LORA.rank, lora_alpha=LORA.alpha, target_modules=targets, task_type="CAUSAL_LM"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_that_are_packed(kind):
    model, plain = adapted(kind), make_exact(stock(kind))
    plain.load_weights(model.merged_weights())
    assert torch.equal(logits(plain), logits(model))
    with model.adapter_off():  # merged is merged
        merged = model.merged_weights()
    assert all(torch.equal(w, plain.named_weights()[name]) for name, w in merged.items())


@pytest.mark.parametrize("targets", [("q_proj", "wq"), ("lm_head",), ("proj",), ("mlp",), ()])
def test_unknown_lora_target_error_lists_known_ones(targets):
    with pytest.raises(UserError, match="targets are not in this model") as error:
        adapted(lora=Lora(rank=4, alpha=8.0, targets=targets, seed=0))
    assert error.value.expected.endswith(
        "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )
    assert error.value.found == (targets[-1] if targets else "none")


def test_lora_on_mixture_of_experts_leaves_mlps_out():
    """PEFT would take them for the experts, whose linears are exact only as they are."""
    with pytest.raises(UserError) as error:
        adapted(
            "qwen3_moe", Lora(rank=4, alpha=8.0, targets=("up_proj",), seed=0), mlp_only_layers=[1]
        )
    assert error.value.expected.endswith("k_proj, o_proj, q_proj, v_proj")
    assert len(adapted("qwen3_moe", mlp_only_layers=[1]).adapted) == 8


# ---- gradients


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_pefts_own_unmerged_module(kind):
    model, theirs = adapted(kind), inject_adapter_in_model(peft_config(kind), stock(kind))
    parameters = {
        name.replace(".default", ""): p for name, p in theirs.named_parameters() if p.requires_grad
    }
    assert parameters.keys() == model.trainable().keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(model.trainable()[name])
    check_same_logits(model, theirs)
    loss_of(exact_logits(model, random_documents())).backward()
    loss_of([stock_logits(theirs, document) for document in random_documents()]).backward()
    for name, parameter in parameters.items():
        scale = parameter.grad.abs().max()
        # float32 sums in another order, through two layers
        torch.testing.assert_close(
            model.trainable()[name].grad, parameter.grad, rtol=0, atol=1e-4 * scale, msg=name
        )
    assert all(p.grad is None for p in model.module.parameters() if not p.requires_grad)


# ---- exports


def check_same_logits(model, other):
    with torch.no_grad():
        theirs = torch.cat([stock_logits(other, document) for document in random_documents()])
    torch.testing.assert_close(logits(model), theirs, rtol=1e-5, atol=5e-5)


def load_trained(kind, source):
    model = load_model(source, LORA)
    model.load_weights(adapted(kind).adapter_weights())
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_a_plain_directory_of_the_merged_model(kind, tmp_path):
    source = save_model(stock(kind), tmp_path / "source")
    model = load_trained(kind, source)
    config = Config.model_validate({"model": {"path": source}, "run": {"seed": 7}})
    about = {"inputs": {"data.train": "0f" * 32}, "versions": {"torch": "2.13.0"}}
    origin = {"command": "train", "metrics": {"step": 3}, **about}
    card = model_card(model, config, **origin)
    told = ["seed 7", f'model.path = "{source}"', f"{'0f' * 32}  data.train", "torch 2.13.0"]
    assert all(text in card for text in told)
    hub = Config.model_validate({"model": {"path": "Qwen/Qwen3-0.6B"}})
    heads = [one.split("---")[1] for one in (card, model_card(model, hub, **origin))]
    assert ["base_model" in head for head in heads] == [False, True]
    assert 'base_model: "Qwen/Qwen3-0.6B"\n' in heads[1]
    folder = export(model, source, tmp_path / "out", card)
    files = {p.name for p in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files
    assert not any("adapter" in name for name in files)
    assert not any("lora" in name for name in load_file(folder / "model.safetensors"))
    check_same_logits(
        model, AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    )
    assert torch.equal(logits(load_model(str(folder))), logits(model))
    assert not torch.equal(logits(load_model(source)), logits(model))
    again = model_card(load_model(str(folder)), config, **origin)
    assert again == card  # the hash on it is that of the weights beside it


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_adapter_is_read_by_peft(kind, tmp_path):
    source = save_model(stock(kind), tmp_path / "source")
    model = load_trained(kind, source)
    folder = export_adapter(model, source, tmp_path / "adapter", "card")
    adapter = {"adapter_config.json", "adapter_model.safetensors"}
    assert {p.name for p in folder.iterdir()} == {*adapter, "README.md", "SHA256SUMS"}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == source
    base = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")
    check_same_logits(model, PeftModel.from_pretrained(base, folder))
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
