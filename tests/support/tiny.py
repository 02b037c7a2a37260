"""Tiny random models of each exact architecture, and their stock twins in plain transformers.

A twin has the same weights and eager attention, and shares no code of Tandem's.
"""

import json

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tandem.model.load import make_exact
from tandem.model.lora import Lora
from tandem.model.tiny import make_tokenizer
from tandem.types import Sample
from tests.support import architectures
from tests.support.architectures import VOCAB

SHAPE = {
    **architectures.SHAPE,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "llama": {},
    "qwen2": {},
    "qwen2 half windowed": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 8, "head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 44,
        "norm_topk_prob": True,
    },
}

LORA = Lora(rank=4, alpha=8.0, targets=("all-linear",), seed=7)


def tiny_config(kind="llama", **changes):
    return AutoConfig.for_model(kind.partition(" ")[0], **{**SHAPE, **CONFIGS[kind], **changes})


def stock_model(config, weights=None, seed=0):
    """Plain transformers, eager attention, float32; random unless weights are given by name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    if weights is not None:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}  # a tied head is its embedding
        model.tie_weights()
    return model


def exact_model(kind="llama", seed=0, **changes):
    return make_exact(stock_model(tiny_config(kind, **changes), seed=seed))


def twins(kind="llama", seed=0, **changes):
    """(exact, stock) with equal weights and separate tensors."""
    return exact_model(kind, seed, **changes), stock_model(tiny_config(kind, **changes), seed=seed)


def value_twins(kind="llama", seed=0, *, score=0.1, **changes):
    """(exact, stock) value models of one number a token; score is the size of their random head."""
    models = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = tiny_config(kind, num_labels=1, **changes)
            model = (
                AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
                .float()
                .eval()
            )
            torch.nn.init.normal_(model.score.weight, std=score)
        models.append(model)
    return make_exact(models[0]), models[1]


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def moved(model, size=0.1):
    """The model with random numbers in all that is trained."""
    random = torch.Generator().manual_seed(1)
    weights = model.trainable().items()
    model.load_weights({n: size * torch.randn(w.shape, generator=random) for n, w in weights})
    return model


def save_model(model, folder, **tokenizer):
    """Write a model directory with a tokenizer of characters; return it as text."""
    model.save_pretrained(folder)
    make_tokenizer(**tokenizer).save_pretrained(folder)
    return str(folder)


def change_json(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def same_weights(model, other):
    own, others = model.named_weights(), other.named_weights()
    return own.keys() == others.keys() and all(torch.equal(w, others[n]) for n, w in own.items())


def stock_logits(model, tokens):
    return model(input_ids=torch.as_tensor(tokens)[None]).logits[0]


def exact_logits(model, documents):
    """The logits of each document, out of one packed pass over all of them."""
    lengths = [len(d) for d in documents]
    firsts = np.cumsum([0, *lengths[:-1]])
    nothing = np.zeros(len(lengths), np.int64)
    plan = model.packed_plan(np.stack([firsts, lengths, nothing, nothing], 1))
    tokens = torch.from_numpy(np.concatenate(documents))
    positions = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))
    return model.head(model.hidden(tokens, positions, plan)).split(lengths)


def random_tokens(rng, length):
    return rng.integers(0, VOCAB, length).astype(np.int64)


def random_documents():
    return [random_tokens(np.random.default_rng(n), n) for n in (1, 17, 40)]


def make_sample(tokens, mask, *, prefix=0, group=0):
    return Sample(
        tokens=np.asarray(tokens, np.int64),
        loss_mask=np.asarray(mask, bool),
        prefix=prefix,
        group=group,
    )


def random_samples(rng, groups, *, longest=24):
    """Groups of three; every other one shares a prompt, and the sharing groups have a one-token
    response."""
    samples = []
    for group in range(groups):
        prefix = int(rng.integers(1, longest)) if group % 2 else 0
        prompt = random_tokens(rng, prefix)
        for number in range(3):
            own = 1 if prefix and number == 0 else int(rng.integers(2, longest))
            tokens = np.concatenate([prompt, random_tokens(rng, own)])
            mask = np.arange(len(tokens)) >= max(prefix, 1)
            samples.append(make_sample(tokens, mask, prefix=prefix, group=group))
    return samples
