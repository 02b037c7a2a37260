"""Generation of Tandem's engine against `generate` of transformers: same weights, same prompts, same number of tokens.

    python benchmarks/decode.py MODEL_DIR      prints one JSON line

Sampling at temperature 1 is included on both sides; no sequence stops early. Decode is the time of 48 tokens less that of one,
so that prefill (64 tokens a sequence) is told apart. The floor is arithmetic: a decode step reads every weight once and does
2 FLOPs a weight and sequence, so
    floor tok/s = batch / max(4 bytes x parameters / bandwidth, 2 x parameters x batch / GEMM peak).
"""

import json
import statistics
import sys
import time
from functools import partial

import numpy as np
import torch
from machine import ceilings
from transformers import AutoModelForCausalLM

from tandem.build import prepare_process
from tandem.config import Config
from tandem.engine.engine import Engine
from tandem.model.load import load_model
from tandem.types import Request, SamplingParams

PROMPT, NEW, ROUNDS = 64, 48, 3


def main() -> None:
    path = sys.argv[1]
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model = load_model(path)
    prepare_process(Config())
    parameters = sum(p.numel() for p in model.module.parameters())
    limits = ceilings()
    rows = {}
    for batch in (1, 8, 32):
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, 1000, (batch, PROMPT))
        engine = Engine(model, lambda tokens: "", cache_bytes=1 << 30, max_batch=256)
        sides = {"generate": partial(_generate, stock, prompts), "tandem": partial(_tandem, engine, prompts)}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(ROUNDS):  # alternating, so that a drift of the machine meets both
            for name, side in sides.items():
                seconds[name].append((side(1), side(NEW)))
        weights_s = 4 * parameters / limits["read_gb_s"] / 1e9
        row = {"floor_tok_s": batch / max(weights_s, 2 * parameters * batch / limits["gemm_gflops"] / 1e9)}
        for name, times in seconds.items():
            row[f"{name}_decode_tok_s"] = batch * (NEW - 1) / statistics.median(whole - first for first, whole in times)
            row[f"{name}_prefill_s"] = statistics.median(first for first, _ in times)
            row[f"{name}_s"] = statistics.median(whole for _, whole in times)
        rows[batch] = row
    print(json.dumps({"bench": "decode", **limits, "parameters": parameters, "batches": rows}))


def _generate(stock: torch.nn.Module, prompts: np.ndarray, new: int) -> float:
    ids = torch.from_numpy(prompts)
    start = time.perf_counter()
    with torch.no_grad():
        out = stock.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            min_new_tokens=new, max_new_tokens=new, pad_token_id=0,
        )  # fmt: skip
    assert out.shape[1] == PROMPT + new
    return time.perf_counter() - start


def _tandem(engine: Engine, prompts: np.ndarray, new: int) -> float:
    params = SamplingParams(max_new_tokens=new)
    requests = [Request(key=i, prompt=prompt.astype(np.int64), params=params) for i, prompt in enumerate(prompts)]
    start = time.perf_counter()
    out = engine.generate(requests)
    assert all(len(c.tokens) == new for c in out)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
