"""Decode of samples that share the pages of their prompt, with each page read once and as before.

    python benchmarks/shared_prefix.py [LAYERS WIDTH VOCABULARY]      prints one JSON line

Before means: each sample reads the pages of its prompt for itself, and computes its last full page
into a copy. 64 tokens of 16 prompts x 8 samples, of groups with other sizes, of one prompt for all,
and, where nothing is shared, of 32 and 64 different prompts. The model is random, with three query
heads of 64 for each key/value head. Two engines, one each way, take turns of eight steps; medians
of the steps in which all sequences decode. Both sample the same tokens.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from machine import ceilings
from transformers import AutoModelForCausalLM, LlamaConfig

import tandem.model.page_columns
from tandem.config.schema import Config
from tandem.engine.engine import Engine
from tandem.engine.page_cache import PageCache
from tandem.engine.scheduler import RunningSequence
from tandem.jobs.engines import prepare_process
from tandem.model.load import ExactModel, make_exact
from tandem.types import Request, SamplingParams

NEW, TURN = 64, 8
MERGE = PageCache.merge
LEAST_SAVED = tandem.model.page_columns.LEAST_SAVED


def main() -> None:
    layers, width, vocabulary = (int(x) for x in sys.argv[1:] or (8, 576, 512))
    prepare_process(Config())
    model = random_model(layers, width, vocabulary)
    result = {
        "bench": "shared_prefix",
        **ceilings(),
        "parameters": sum(p.numel() for p in model.module.parameters()),
        "layers": layers,
        "width": width,
        "rows": {},
    }
    uneven = np.random.default_rng(0).integers(1, 16, 16).tolist()
    for name, groups, prompt in (
        ("16 prompts of 256 tokens x 8 samples", [8] * 16, 256),
        ("16 prompts of 200 tokens x 8 samples", [8] * 16, 200),
        ("16 prompts of 256 tokens x 1 to 15 samples", uneven, 256),
        ("one prompt of 512 tokens x 64 samples", [64], 512),
        ("32 different prompts of 256 tokens", [1] * 32, 256),
        ("64 different prompts of 256 tokens", [1] * 64, 256),
    ):
        result["rows"][name] = row = compare(model, groups, prompt)
        print(f"{name}: {row}", file=sys.stderr, flush=True)
    print(json.dumps(result))


def random_model(layers: int, width: int, vocabulary: int) -> ExactModel:
    kv_heads = max(1, width // 192)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=3 * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    return make_exact(AutoModelForCausalLM.from_config(config).float().eval())


def compare(model: ExactModel, groups: list[int], prompt: int) -> dict[str, float]:
    steps: dict[str, list[float]] = {"each": [], "once": []}
    requests = requests_of(groups, prompt)
    engines = {name: engine_of(model, len(requests)) for name in steps}
    asked = {name: [engine.submit(r) for r in requests] for name, engine in engines.items()}
    while any(engine.has_work for engine in engines.values()):
        for name, engine in engines.items():
            with reading(name):
                steps[name] += decode_steps(engine, asked[name])
    each, once = ([s.completion for s in asked[name]] for name in ("each", "once"))
    assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(each, once, strict=True))
    each_s, once_s = (statistics.median(seconds) for seconds in steps.values())
    sequences = sum(groups)
    return {
        "each_tok_s": sequences / each_s,
        "once_tok_s": sequences / once_s,
        "ratio": each_s / once_s,
    }


def requests_of(groups: list[int], prompt: int) -> list[Request]:
    prompts = np.random.default_rng(0).integers(0, 500, (len(groups), prompt)).repeat(groups, 0)
    params = SamplingParams(max_new_tokens=NEW)
    return [Request(key=n, prompt=tokens, params=params) for n, tokens in enumerate(prompts)]


def engine_of(model: ExactModel, batch: int) -> Engine:
    return Engine(model, lambda tokens: "", cache_bytes=3 << 29, max_batch=batch)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Read shared pages for "each" sequence, or "once"."""
    if name == "each":
        PageCache.merge = lambda self, page: page  # type: ignore[method-assign]
        tandem.model.page_columns.LEAST_SAVED = 1.0  # no tile saves all of the time
    try:
        yield
    finally:
        PageCache.merge = MERGE  # type: ignore[method-assign]
        tandem.model.page_columns.LEAST_SAVED = LEAST_SAVED


def decode_steps(engine: Engine, asked: list[RunningSequence]) -> list[float]:
    """Run TURN steps: seconds of those in which every sequence decodes one token."""
    seconds = []
    for _ in range(TURN):
        if not engine.has_work:
            break
        all_decode = all(s.tokens and s.completion is None for s in asked)
        start = time.perf_counter()
        engine.step()
        if all_decode:
            seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
