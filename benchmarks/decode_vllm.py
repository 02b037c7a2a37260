"""Decode of vLLM on a CPU, or of Tandem, in float32: one engine in a process of its own.

    .venv-vllm/bin/python benchmarks/decode_vllm.py vllm MODEL_DIR
    .venv/bin/python benchmarks/decode_vllm.py tandem MODEL_DIR

prints {batch: tokens a second} as one JSON line. 48 tokens of 1, 8 and 32 prompts of 64 tokens at
temperature 1, none stops early; decode is the time of 48 tokens less that of one, medians. vLLM
compiles, as it does unless told otherwise, and caches no prefixes, so that each round has its
prefill. `make bench only=vllm` runs the two by turns.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

PROMPT, NEW, ROUNDS, BATCHES = 64, 48, 5, (1, 8, 32)
Generate = Callable[[list[list[int]], int], object]


def main(side: str, model: str) -> None:
    generate = {"vllm": vllm, "tandem": tandem}[side](model)
    speeds = {}
    for batch in BATCHES:
        seconds: dict[int, list[float]] = {1: [], NEW: []}
        for number in range(ROUNDS + 1):  # the first one warms up
            prompts = np.random.default_rng(number).integers(0, 1000, (batch, PROMPT)).tolist()
            for new, times in seconds.items():
                start = time.perf_counter()
                generate(prompts, new)
                times.append(time.perf_counter() - start)
        first, whole = (statistics.median(times[1:]) for times in seconds.values())
        speeds[batch] = batch * (NEW - 1) / (whole - first)
    print(json.dumps(speeds))


def vllm(model: str) -> Generate:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, as Tandem's
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="float32", enable_prefix_caching=False, max_model_len=1024)

    def generate(prompts: list[list[int]], new: int) -> object:
        params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=new)
        return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    return generate


def tandem(model: str) -> Generate:
    from tandem.config.schema import Config
    from tandem.engine.engine import Engine
    from tandem.jobs.engines import prepare_process
    from tandem.model.load import load_model
    from tandem.types import Request, SamplingParams

    prepare_process(Config())
    engine = Engine(load_model(model), lambda tokens: "", cache_bytes=1 << 30, max_batch=256)

    def generate(prompts: list[list[int]], new: int) -> object:
        params = SamplingParams(max_new_tokens=new)
        rows = [np.array(prompt, np.int64) for prompt in prompts]
        done = engine.generate(
            [Request(key=key, prompt=row, params=params) for key, row in enumerate(rows)]
        )
        engine.cache.flush()
        return done

    return generate


if __name__ == "__main__":
    main(*sys.argv[1:])
