"""Tiny random models of architectures that run through transformers' own forward pass, and their
stock twins."""

import dataclasses

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.model.load import make_exact
from tandem.model.paths import path_of
from tandem.model.tiny import make_tokenizer

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 172,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {"num_key_value_heads": 2}
# eight: of six outputs MKL splits the sum of a gradient by threads
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
MANY = {"num_experts": 8, "num_experts_per_tok": 2}
SMALL = {**MANY, "moe_intermediate_size": 60}
WINDOWED = {**GROUPED, "head_dim": 16, "sliding_window": 40}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 60,
    "first_k_dense_replace": 1,
}
SHARED_KEYS = {  # of earlier layers, and embeddings for each layer
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
CONVOLVED = {"layer_types": ["conv", "full_attention", "conv"]}  # short convolutions
ARCHITECTURES = {
    "apertus": GROUPED,
    "arcee": GROUPED,
    "bloom": {},
    "cohere": GROUPED,
    "cohere2": {**GROUPED, "sliding_window": 40},
    "ernie4_5": GROUPED,
    "ernie4_5_moe": {
        **GROUPED,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 60,
        "moe_layer_start_index": 1,
    },
    "exaone4": {**GROUPED, "sliding_window": 40},
    "gemma": {**GROUPED, "head_dim": 16},
    "gemma2": WINDOWED,
    "gemma3_text": WINDOWED,
    "gemma4_text": {  # with layers of two widths, and keys that are values too
        **SHARED_KEYS,
        "num_key_value_heads": 6,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
    },
    "glm": {**GROUPED, "head_dim": 16},
    "glm4": {**GROUPED, "head_dim": 16},
    "glm4_moe": {**GROUPED, **ROUTED, "n_group": 1},
    "gpt2": {"n_inner": 172},
    "gpt_neox": {},
    "gpt_oss": {**WINDOWED, **EXPERTS},
    "granitemoe": {**GROUPED, **EXPERTS},
    "lfm2": {**GROUPED, **CONVOLVED, "conv_bias": True},
    "mixtral": {**GROUPED, **EXPERTS},
    "olmoe": {**GROUPED, **MANY},
    "qwen2_moe": {**GROUPED, **SMALL, "shared_expert_intermediate_size": 60},
    "deepseek_v3": {**LATENT, **ROUTED},
    "granite": {**GROUPED, "logits_scaling": 8.0},
    "helium": {**GROUPED, "head_dim": 16},
    "hunyuan_v1_dense": {**GROUPED, "head_dim": 16},
    "ministral3": {**GROUPED, "head_dim": 16},
    "nemotron": GROUPED,
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "olmo3": {**GROUPED, "sliding_window": 40},
    "opt": {"ffn_dim": 172, "word_embed_proj_dim": 96},
    "phi": GROUPED,
    "phi3": {**GROUPED, "sliding_window": 40},
    "seed_oss": GROUPED,
    "smollm3": GROUPED,
    "stablelm": GROUPED,
    "starcoder2": {**GROUPED, "sliding_window": 40},
}

# In `make models` alone: of the kinds above, or rarer.
MORE = {
    "afmoe": {**WINDOWED, **SMALL, "num_dense_layers": 1},
    "aria_text": {**GROUPED, "moe_num_experts": 8, "moe_topk": 2},
    "biogpt": {},
    "cohere2_moe": {**WINDOWED, **MANY},
    "cwm": {**WINDOWED, "bos_token_id": 1, "eos_token_id": 2},
    "deepseek_v2": {**LATENT, **ROUTED},
    "dots1": {
        **GROUPED,
        **ROUTED,
        "n_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
    },
    "exaone_moe": {**GROUPED, **SMALL, "sliding_window": 40},
    "flex_olmo": {**GROUPED, **MANY},
    "glm4_moe_lite": {**LATENT, **ROUTED},
    "gpt_bigcode": {"n_inner": 172},
    "gemma3n_text": {
        **SHARED_KEYS,
        "activation_sparsity_pattern": [0.0] * 5,
        "altup_num_inputs": 2,
        "intermediate_size": [172] * 5,
        "laurel_rank": 8,
    },
    "granitemoehybrid": {
        **GROUPED,
        "layer_types": ["attention"] * 3,
        "mamba_n_heads": 6,
        "mamba_d_head": 32,
        "num_local_experts": 0,
        "shared_intermediate_size": 172,
    },
    "granitemoeshared": {**GROUPED, **EXPERTS, "shared_intermediate_size": 60},
    "hunyuan_v1_moe": {**GROUPED, "head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "hyperclovax": GROUPED,
    "internlm3": {**GROUPED, "head_dim": 16},
    "jais2": GROUPED,
    "lfm2_moe": {**GROUPED, **CONVOLVED, **SMALL, "num_dense_layers": 1},
    "minicpm3": LATENT,
    "minimax_m2": {**GROUPED, **EXPERTS, "head_dim": 16},
    "ministral": WINDOWED,
    "nanochat": GROUPED,
    "persimmon": {},
    "phimoe": {**GROUPED, **EXPERTS},
    "solar_open": {**GROUPED, **ROUTED, "n_group": 1},
    "vaultgemma": WINDOWED,
    "youtu": LATENT,
}


LEAN = {
    "llama": GROUPED,
    "mistral": WINDOWED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "qwen3_moe": {**GROUPED, **SMALL, "head_dim": 16, "num_experts": 6, "decoder_sparse_step": 1},
}


LINEAR = {  # linear attention
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
INEXACT = {  # with a state, or attention of their own
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 12, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 32},
    "qwen3_5_text": {**GROUPED, **LINEAR, "head_dim": 16},
    "qwen3_next": {
        **GROUPED,
        **LINEAR,
        **SMALL,
        "head_dim": 16,
        "shared_expert_intermediate_size": 60,
    },
}


# With a part each that others lack: a soft cap, latent attention with a router of sigmoids, linear
# biases, short convolutions, layers of two widths, sinks with experts that have biases, Conv1D with
# learned positions, layers beside each other, experts, biases in the head; two that keep a state.
A_COMMIT = (
    *("gemma2", "deepseek_v3", "bloom", "lfm2", "gemma4_text", "gpt_oss", "gpt2", "cohere2"),
    *("mixtral", "phi", "qwen3_5_text", "mamba2"),
)


def by_need(names):
    """Parameters of a test: the names of A_COMMIT, and the others for the night."""
    return [n if n in A_COMMIT else pytest.param(n, marks=pytest.mark.nightly) for n in names]


def architecture(name, **changes):
    """The transformers config of a tiny model."""
    values = {**SHAPE, **{**ARCHITECTURES, **MORE, **LEAN, **INEXACT}[name], **changes}
    if "ffn_dim" in values or "n_inner" in values:
        del values["intermediate_size"]
    kind = type(AutoConfig.for_model(name))
    if name in INEXACT:  # whose configs keep what they do not know
        known = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
        values = {name: value for name, value in values.items() if name in known}
    return kind(**values)


def stock(name, seed=0, **changes):
    """Plain transformers, eager attention; every weight random, those that start at zero
    too, as are the buffers that a checkpoint has."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = architecture(name, **changes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        randomize(model)
        if name == "gemma4_text":  # whose trained norms hold the scale of attention
            for layer in model.model.layers:
                layer.self_attn.q_norm.weight.data *= layer.self_attn.head_dim**-0.5
        kept = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in kept and buffer.is_floating_point():
                buffer.copy_(torch.randn(buffer.shape) * 0.1)
    return model


def randomize(model):
    for weight in model.parameters():
        spread = torch.randn(weight.shape)
        weight.data = spread * 0.1 + (weight.data if weight.dim() < 2 else 0.0)


def exact(name, lora=None, seed=0, **changes):
    return make_exact(stock(name, seed, **changes), lora)


def vocabulary_of(tokenizer):
    """Return what the config of a model says of its tokenizer."""
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {"vocab_size": len(tokenizer), **ends}


def save_architecture(name, folder, **changes):
    """Write a model directory with a tokenizer of characters."""
    tokenizer = make_tokenizer()
    sizes = vocabulary_of(tokenizer)
    if name in ("gemma3n_text", "gemma4_text"):  # with embeddings for each layer
        sizes["vocab_size_per_layer_input"] = len(tokenizer)
    stock(name, **sizes, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def inexact(name, lora=None, seed=0, **changes):
    """The model of the inexact path, and why it is there."""
    config = architecture(name)
    return path_of(config, "here").maker("", config, None)(stock(name, seed, **changes), lora)


def why_inexact(config, place=None):
    """Why a model of a transformers config cannot be exact; "" if it is."""
    return path_of(config, "here", place).gap(config, place)
