"""Tandem's engine against transformers: same weights, same prompts, same number of sampled tokens,
temperature 1.

    python benchmarks/decode.py MODEL_DIR [steady] [bfloat16] [long] [ragged] [shared] [exact]      prints one JSON line

steady   48 tokens of 1, 8, 32 and 64 prompts of 64 tokens. Decode is the time of 48 tokens less that of one.
bfloat16 the same with both sides in bfloat16.
long     steady at a context of 404 to 452 tokens, in pages with gaps between them, as after a while of serving: four page
         columns, all of them gathered.
ragged   16 prompts x 8 samples whose lengths differ, the longest about 4 times the mean. `generate` runs the whole batch
         until the longest has ended; `generate_batch` is transformers' own continuous batching. Tokens that were asked for
         count. One round.
shared   a prompt of 512 tokens and 8 samples: time to the first token of all, and of 8 different prompts.
exact    the plain kernels without what makes rows exact outside attention: no padding of rows, torch's SiLU. (Attention by
         pages is the engine's own on both sides.)

Sides alternate, so that a drift of the machine meets each; medians. Sampling is included, no
sequence stops early.
"""

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from machine import ceilings
from roofline import decode_floor, prefill_floor
from transformers import AutoModelForCausalLM, GenerationConfig

from tandem.config.schema import Config
from tandem.engine.engine import Engine
from tandem.engine.page_cache import PageCache
from tandem.jobs.engines import prepare_process
from tandem.model.kernels import CPU as PLAIN
from tandem.model.kernels import Kernels, in_use
from tandem.model.load import ExactModel, load_model
from tandem.model.placement import Placement
from tandem.types import Request, SamplingParams

PROMPT, LONG, NEW, ROUNDS = 64, 404, 48, 3


def main() -> None:
    path, *parts = sys.argv[1:]
    prepare_process(Config())
    model = load_model(path)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    before = ceilings()
    result = {
        "bench": "decode",
        **before,
        "parameters": sum(p.numel() for p in model.module.parameters()),
    }
    result["head_parameters"] = model.head.weight.numel()
    sides = {
        "steady": steady,
        "bfloat16": bfloat16,
        "long": long,
        "ragged": ragged,
        "shared": shared,
        "exact": exact,
    }
    for part in parts or list(sides):
        result[part] = sides[part](stock, model)
    # a machine that others share has better and worse minutes
    for name, after in ceilings().items():
        result[name] = max(before[name], after)
    for part, prompt in (("steady", PROMPT), ("long", LONG)):
        for batch, row in result.get(part, {}).items():
            row["floor_tok_s"] = floor(result, model, batch, prompt + NEW / 2)
    if "shared" in result:
        result["shared"]["floor_s"] = prefill_floor(
            512,
            parameters=result["parameters"],
            head=result["head_parameters"],
            gemm_gflops=result["gemm_gflops"],
        )
    print(json.dumps(result))


def steady(stock: torch.nn.Module, model: ExactModel) -> dict:
    rows = {}
    for batch in (1, 8, 32, 64):
        prompts = np.random.default_rng(0).integers(0, 1000, (batch, PROMPT))
        engine = engine_of(model)
        sides = {
            "generate": partial(_generate, stock, prompts),
            "tandem": partial(_tandem, engine, prompts),
        }
        rows[batch] = decode_speeds(sides, batch)
    return rows


def bfloat16(stock: torch.nn.Module, model: ExactModel) -> dict:
    place = Placement(torch.device("cpu"), torch.bfloat16)
    path = stock.name_or_path
    return steady(copy.deepcopy(stock).bfloat16(), load_model(path, place=place))


def long(stock: torch.nn.Module, model: ExactModel) -> dict:
    rows = {}
    for batch in (1, 8, 32):
        prompts = np.random.default_rng(0).integers(0, 1000, (batch, LONG))
        engine = engine_of(model)
        scatter_pages(engine)
        sides = {
            "generate": partial(_generate, stock, prompts),
            "tandem": partial(_tandem, engine, prompts),
        }
        rows[batch] = decode_speeds(sides, batch)
    return rows


def scatter_pages(engine: Engine) -> None:
    """Let the cache hand out three quarters of its pages, chosen at random, and flush to the same."""
    count = engine.cache.count
    order = sorted(np.random.default_rng(0).permutation(count)[: count * 3 // 4].tolist())
    flush = engine.cache.flush

    def scattered() -> None:
        flush()
        engine.cache._free = list(order)

    engine.cache.flush = scattered  # type: ignore[method-assign]
    scattered()


def ragged(stock: torch.nn.Module, model: ExactModel) -> dict:
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, 1000, (16, PROMPT)).repeat(8, 0)
    lengths = np.minimum(np.maximum(rng.lognormal(3.2, 0.75, len(prompts)).astype(int), 1), 128)
    lengths[7] = 128
    engine = engine_of(model)
    sides = {
        "tandem": lambda: _tandem(engine, prompts, lengths),
        "generate": lambda: _generate(stock, prompts, int(lengths.max())),
        "generate_batch": lambda: _generate_batch(stock, prompts, lengths),
    }
    seconds = alternating(sides, rounds=1)
    return {
        "tokens": int(lengths.sum()),
        "max_over_mean": float(lengths.max() / lengths.mean()),
    } | {f"{name}_s": value for name, value in seconds.items()}


def shared(stock: torch.nn.Module, model: ExactModel) -> dict:
    rng = np.random.default_rng(2)

    def first_tokens(distinct: int) -> float:
        # new ones each time: none is cached
        prompts = rng.integers(0, 1000, (distinct, 512)).repeat(8 // distinct, 0)
        return _tandem(engine_of(model), prompts, 1)

    seconds = alternating(
        {"shared": lambda: first_tokens(1), "unshared": lambda: first_tokens(8)}, rounds=3
    )
    return {f"{name}_s": value for name, value in seconds.items()}


def exact(stock: torch.nn.Module, model: ExactModel) -> dict:
    rows, kernels = {}, {"exact": PLAIN, "inexact": Inexact()}
    models = {name: copy.deepcopy(model) for name in kernels}
    for batch in (8, 32):
        prompts = np.random.default_rng(0).integers(0, 1000, (batch, PROMPT))
        engines = {name: engine_of(own) for name, own in models.items()}

        def side(
            name: str, new: int, prompts: np.ndarray = prompts, engines: dict = engines
        ) -> float:
            in_use["cpu"] = kernels[name]
            return _tandem(engines[name], prompts, new)

        rows[batch] = decode_speeds({name: partial(side, name) for name in engines}, batch)
    return rows


class Inexact(Kernels):
    """Linears of just the rows there are, and torch's SiLU."""

    def matmul(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)


def decode_speeds(sides: dict[str, Callable[[int], float]], batch: int) -> dict[str, float]:
    times = {
        f"{name} {new}": partial(side, new) for name, side in sides.items() for new in (1, NEW)
    }
    seconds = alternating(times, rounds=ROUNDS if batch > 8 else 2 * ROUNDS)
    row = {}
    for name in sides:
        first, whole = seconds[f"{name} 1"], seconds[f"{name} {NEW}"]
        row |= {
            f"{name}_decode_tok_s": batch * (NEW - 1) / (whole - first),
            f"{name}_prefill_s": first,
            f"{name}_s": whole,
        }
    return row


def alternating(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name].append(side())
    return {name: statistics.median(times) for name, times in seconds.items()}


def floor(known: dict, model: ExactModel, batch: int, context: float) -> float:
    per_token = PageCache(model, 1 << 27).page_bytes // 128
    limits = {name: known[name] for name in ("parameters", "read_gb_s", "gemm_gflops")}
    return decode_floor(batch, context=context, kv_bytes_per_token=per_token, **limits)


def engine_of(model: ExactModel) -> Engine:
    return Engine(model, lambda tokens: "", cache_bytes=1 << 30, max_batch=256)


def _generate(stock: torch.nn.Module, prompts: np.ndarray, new: int) -> float:
    ids = torch.from_numpy(prompts)
    start = time.perf_counter()
    with torch.no_grad():
        out = stock.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        )
    assert out.shape[1] == prompts.shape[1] + new
    return time.perf_counter() - start


def _generate_batch(stock: torch.nn.Module, prompts: np.ndarray, lengths: np.ndarray) -> float:
    """transformers' continuous batching, each request with its own length."""
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=128, eos_token_id=-1
    )
    manager = stock.init_continuous_batching(generation_config=config)
    manager.start()
    start = time.perf_counter()
    for prompt, new in zip(prompts.tolist(), lengths.tolist(), strict=True):
        manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1)
    tokens = 0
    for _ in lengths:
        tokens += len(manager.get_result(timeout=600).generated_tokens)
    seconds = time.perf_counter() - start
    manager.stop(block=True)
    assert tokens == lengths.sum(), f"{tokens} tokens, asked for {lengths.sum()}"
    return seconds


def _tandem(engine: Engine, prompts: np.ndarray, new: int | np.ndarray) -> float:
    lengths = np.broadcast_to(new, len(prompts))
    start = time.perf_counter()
    out = engine.generate(
        [
            Request(
                key=i,
                prompt=prompt.astype(np.int64),
                params=SamplingParams(max_new_tokens=int(length)),
            )
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
    )
    seconds = time.perf_counter() - start
    assert [len(c.tokens) for c in out] == lengths.tolist()
    engine.cache.flush()  # the next round finds nothing cached
    return seconds


if __name__ == "__main__":
    main()
