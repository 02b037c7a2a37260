"""Generation of Tandem's engine against `generate` of transformers: same weights, same prompts, same number of tokens.

    python benchmarks/decode.py MODEL_DIR      prints one JSON line

Sampling at temperature 1 is included on both sides, and prefill too (64 tokens); no sequence stops early. The floor is
arithmetic: a step reads every weight once and does 2 FLOPs a weight and sequence, so
    floor tok/s = batch / max(4 bytes x parameters / bandwidth, 2 x parameters x batch / GEMM peak).
"""

import json
import statistics
import sys
import time

import numpy as np
import torch
from machine import ceilings
from transformers import AutoModelForCausalLM

from tandem.engine.engine import Engine
from tandem.model.load import load_model
from tandem.types import Request, SamplingParams

PROMPT, NEW, ROUNDS = 64, 48, 3


def main() -> None:
    path = sys.argv[1]
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model = load_model(path)
    parameters = sum(p.numel() for p in model.module.parameters())
    limits = ceilings()
    rows = {}
    for batch in (1, 8, 32):
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, 1000, (batch, PROMPT))
        engine = Engine(model, lambda tokens: "", cache_bytes=1 << 30, max_batch=256)
        theirs, ours = [], []
        for _ in range(ROUNDS):  # alternating, so that a drift of the machine meets both
            theirs.append(_generate(stock, prompts))
            ours.append(_tandem(engine, prompts))
        ratio = statistics.median(theirs) / statistics.median(ours)
        weights_s = 4 * parameters / limits["read_gb_s"] / 1e9
        floor = batch / max(weights_s, 2 * parameters * batch / limits["gemm_gflops"] / 1e9)
        rows[batch] = {
            "generate_tok_s": batch * NEW / statistics.median(theirs),
            "tandem_tok_s": batch * NEW / statistics.median(ours),
            "ratio": ratio,
            "floor_tok_s": floor,
        }
    print(json.dumps({"bench": "decode", **limits, "parameters": parameters, "batches": rows}))


def _generate(stock: torch.nn.Module, prompts: np.ndarray) -> float:
    ids = torch.from_numpy(prompts)
    start = time.perf_counter()
    with torch.no_grad():
        out = stock.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            min_new_tokens=NEW, max_new_tokens=NEW, pad_token_id=0,
        )  # fmt: skip
    assert out.shape[1] == PROMPT + NEW
    return time.perf_counter() - start


def _tandem(engine: Engine, prompts: np.ndarray) -> float:
    params = SamplingParams(max_new_tokens=NEW)
    requests = [Request(key=i, prompt=prompt.astype(np.int64), params=params) for i, prompt in enumerate(prompts)]
    start = time.perf_counter()
    out = engine.generate(requests)
    assert all(len(c.tokens) == NEW for c in out)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
