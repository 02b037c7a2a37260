"""A tiny model with an engine, requests for it, and what two completions are compared by."""

import string

import numpy as np

from tandem.engine.engine import Engine
from tandem.engine.page_cache import page_bytes
from tandem.runtime.rng import address
from tandem.types import Request, SamplingParams
from tests.support.tiny import exact_model, random_tokens

MODEL = exact_model("qwen3")


class CountingModel:
    """Passes everything on to a model and counts the tokens that run through it, one entry a
    pass."""

    def __init__(self, model):
        self.model, self.config = model, model.config
        self.heads, self.head = model.heads, model.head
        self.changes, self.paged_plan, self.device = model.changes, model.paged_plan, model.device
        self.window, self.engine, self.kernels = model.window, model.engine, model.kernels
        self.passes = []

    def hidden(self, tokens, positions, plan, choices=None):
        self.passes.append(len(tokens))
        return self.model.hidden(tokens, positions, plan, choices)


def decode(tokens):
    """Token 3 is "d", token 29 is "D", and so on: one character each."""
    letters = string.ascii_letters + string.digits
    return "".join(letters[token % 62] for token in tokens)


def engine_of(model=MODEL, *, cache_bytes=1 << 26, max_batch=64):
    return Engine(model, decode, cache_bytes=cache_bytes, max_batch=max_batch)


def paged_engine(model=MODEL, pages=64, *, max_batch=64, **sizes):
    """An engine whose cache has so many pages."""
    size = pages * page_bytes(model.config, model.head.weight.element_size())
    return Engine(model, decode, cache_bytes=size, max_batch=max_batch, **sizes)


def as_it_is():
    """Stands for what captures steps: the function is replayed as it was when it was captured."""
    return lambda step: step


def request(number=0, prompt=(5, 9, 2), **params):
    return Request(
        key=address("test", number),
        prompt=np.array(prompt, np.int64),
        params=SamplingParams(**{"max_new_tokens": 8, **params}),
    )


def prompt(length, seed=0):
    return random_tokens(np.random.default_rng(seed), length)


def mixed_requests(count=14):
    """Prompts of many lengths, some shared, and every kind of ending and filter."""
    rng = np.random.default_rng(0)
    kinds = [
        {"max_new_tokens": 1},
        {"max_new_tokens": 9},
        {"max_new_tokens": 25, "stop_token_ids": (3, 4, 5, 6, 7, 8)},
        {"max_new_tokens": 20, "temperature": 0.7, "top_p": 0.8},
        {"max_new_tokens": 17, "temperature": 1.4, "top_k": 9, "stop": ("a", "Bc")},
        {"max_new_tokens": 30, "temperature": 0.0},
    ]
    prompts = [random_tokens(rng, n).tolist() for n in (1, 4, 16, 33, 60)]
    return [request(n, prompts[n % 5], **kinds[n % 6]) for n in range(count)]


def finish(engine, sequences):
    """Run the engine until these sequences have ended; return what they are compared by."""
    while any(sequence.completion is None for sequence in sequences):
        engine.step()
    return [facts(sequence.completion) for sequence in sequences]


def facts(completion):
    return (
        completion.tokens.tobytes(),
        completion.logprobs.tobytes(),
        completion.weight_versions.tobytes(),
        completion.text,
        completion.stop_reason,
    )
