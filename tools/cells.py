"""Every processor, as far as one machine can be another: the probe's word against what really
happens, cell by cell.

A cell is a model's shape under switches that hold the libraries at older instructions, with MKL's
strict mode and without, with one thread and with two. In each the probe says yes or no; then the
engine serves random requests, the trainer passes over what was sampled, and its gradients are made
with one thread and with two. A cell is wrong where the probe says yes and a bit differs. Switches
are read when a process starts, so each set of them has a process of its own.

    python tools/cells.py 3 0 1 2      results of these cells under the switches of that number, as
                                       JSON lines
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
HEAD_SIZES = (16, 32, 48, 64, 80, 96, 100, 112, 128, 160, 192, 256)
GROUPS = (2, 3, 7, 8)
VOCABULARIES = (997, 50_257, 151_936)
FEW = 512  # tokens of a model of `random_module`
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 60,
    "decoder_sparse_step": 1,
}
AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
}
AVX512 = {
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    "ATEN_CPU_CAPABILITY": "avx512",
}
PROMPTS = (*range(1, 9), 20, 28, 32, 64, 127, 128, 129, 130, *range(255, 261), 300)
ANSWERS = (1, 2, 3, 4, 5, 8, 12, 33)  # tokens


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Example: Shape(name="llama, 2 x 1 heads of 96", architecture="llama", config={"hidden_size":
    96, ...})"""

    name: str
    architecture: str
    config: dict[str, Any]
    longest: int = 300  # tokens of a prompt
    # "lean layer, bfloat16": all weights are random, as norms of one and biases of zero, where
    # transformers begins, round nothing
    variant: str = ""


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Example: Switches(name="MKL at AVX2", variables={"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    strict=True, threads=2)"""

    name: str
    variables: dict[str, str]
    strict: bool
    threads: int


def shapes() -> list[Shape]:
    """Every head size in multi-head attention and in a group, then what else a model can have."""
    made = []
    for number, size in enumerate(HEAD_SIZES):
        for group, kv_heads in ((1, 2), (GROUPS[number % 4], 1 + number % 2)):
            hidden, vocabulary = (96, 100, 172, 250)[(number + group) % 4], VOCABULARIES[0]
            made.append(
                _shape(
                    f"{group} x {kv_heads} heads of {size}",
                    "llama",
                    hidden,
                    group,
                    kv_heads,
                    size,
                    vocabulary,
                )
            )
    small = (64, 2, 2, 32)
    made += [
        _shape(f"vocabulary of {v:,}", "qwen3", *small, v, tie_word_embeddings=v > 60_000)
        for v in VOCABULARIES[1:]
    ]
    for name, rope in ROPES.items():
        made.append(
            _shape(
                f"rope {name}", "llama", *small, 997, rope_parameters={"rope_theta": 1e4, **rope}
            )
        )
    made += [
        _shape("24 layers", "qwen3", *small, 997, num_hidden_layers=24),
        _shape("window of 40", "mistral", 100, 3, 2, 24, 997, sliding_window=40),
        _shape("biases", "llama", 100, 7, 1, 16, 997, attention_bias=True, mlp_bias=False),
        _shape("biases, tied", "qwen2", 112, 7, 1, 16, 997, tie_word_embeddings=True),
        _shape("experts", "qwen3_moe", *small, 997, **EXPERTS),
        _shape(
            "inputs of 1,100 and 2,060",
            "llama",
            1100,
            2,
            2,
            64,
            997,
            intermediate_size=2060,
            num_hidden_layers=1,
        ),
    ]
    context = _shape("context of 6,000", "llama", *small, 997)
    return [
        *made,
        Shape(name=context.name, architecture="llama", config=context.config, longest=6000),
    ]


def variants() -> list[Shape]:
    """Shapes of the other types and layers: bfloat16 weights, and the general path."""
    lean = (
        _shape("2 x 1 heads of 80", "llama", 172, 2, 1, 80, FEW),
        _shape("7 x 1 heads of 48", "qwen3", 100, 7, 1, 48, FEW),
        _shape("experts", "qwen3_moe", 64, 2, 2, 32, FEW, **EXPERTS),
    )
    sizes = {
        "vocab_size": FEW,
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "max_position_embeddings": 8192,
        "pad_token_id": None,
    }
    grouped = {"intermediate_size": 172, "num_key_value_heads": 2, "head_dim": 16}
    general = {
        "gemma3_text": {**sizes, **grouped, "sliding_window": 40},
        "gpt2": {**sizes, "n_inner": 172},
    }
    found = [replace(shape, variant="lean layer, bfloat16") for shape in lean]
    for dtype in ("float32", "bfloat16"):
        variant = f"general path, {dtype}"
        found += [
            Shape(name=f"{name}, {dtype}", architecture=name, config=config, variant=variant)
            for name, config in general.items()
        ]
    return found


def _shape(
    name: str,
    architecture: str,
    hidden: int,
    group: int,
    kv_heads: int,
    size: int,
    vocabulary: int,
    **more: Any,
) -> Shape:
    hidden += -hidden % (group * kv_heads)  # Llama's config insists
    config = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden + 12,
        "num_hidden_layers": 2,
        "num_attention_heads": group * kv_heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 8192,
        "head_dim": size,
    }
    if architecture == "qwen2":  # its head size follows from the others
        del config["head_dim"]
    return Shape(name=name, architecture=architecture, config={**config, **more})


def switches() -> list[Switches]:
    """Default first, everything at AVX2 second: an Intel laptop without AVX-512."""
    libraries = {
        "ONEDNN_MAX_CPU_ISA": "oneDNN",
        "MKL_ENABLE_INSTRUCTIONS": "MKL",
        "ATEN_CPU_CAPABILITY": "ATen",
    }
    sets = {"default": {}, "all at AVX2": AVX2, "all at AVX-512": AVX512}
    for key, library in libraries.items():
        sets |= {
            f"{library} at AVX2": {key: AVX2[key]},
            f"{library} at AVX-512": {key: AVX512[key]},
        }
    return [
        Switches(name=name, variables=variables, strict=strict, threads=threads)
        for strict in (True, False)
        for name, variables in sets.items()
        for threads in (1, 2)
    ]


def plan(each: int) -> dict[int, list[int]]:
    """Shapes by switches, in numbers: all of them for the first two sets in strict mode, of the
    others `each` in turns."""
    count, found, first = len(shapes()), {}, 0
    for number, one in enumerate(switches()):
        size = count if one.strict and one.name in ("default", "all at AVX2") else each
        found[number] = [(first + n) % count for n in range(size)]
        first += 0 if size == count else size
    return found


def plan_of_variants() -> dict[int, list[int]]:
    """Every variant by switches, in numbers: in strict mode, all libraries at the same
    instructions."""
    first = len(shapes())
    every = [first + n for n in range(len(variants()))]
    return {
        number: every
        for number, one in enumerate(switches())
        if one.strict and one.name in ("default", "all at AVX2", "all at AVX-512")
    }


def run(number: int, chosen: list[int], timeout_s: float = 3600) -> list[dict[str, Any]]:
    """The cells of these switches, in a process of their own."""
    one = switches()[number]
    pinned = {"MKL_CBWR", "OMP_NUM_THREADS", "MKL_NUM_THREADS", *AVX2}
    env = {key: value for key, value in os.environ.items() if key not in pinned} | one.variables
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | (
        {} if one.strict else {"MKL_CBWR": "AUTO"}
    )
    command = [sys.executable, "tools/cells.py", str(number), *map(str, chosen)]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )
    if done.returncode:
        raise RuntimeError(f"{one}: {done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def is_false_yes(cell: dict[str, Any], measured: bool = False) -> bool:
    """Tell whether the probe says "exact" of something that is not; measured: what it would say
    without knowing MKL's mode."""
    parity, threads = (
        cell[f"{'measured' if measured else 'says'}_{name}"] for name in ("parity", "threads")
    )
    return bool((parity and cell["gap"] != 0.0) or (threads and not cell["threads_agree"]))


# In the process of the switches
# -------------------------------------------------------------------------------------


def main(number: int, chosen: list[int]) -> None:
    from tandem.runtime import numerics

    one = switches()[number]
    numerics.prepare(one.threads)
    every = [*shapes(), *variants()]
    for cell in chosen:
        shape = every[cell]
        told = {
            "switches": one.name,
            "strict": one.strict,
            "threads": one.threads,
            "shape": shape.name,
            "variant": shape.variant,
        }
        print(
            json.dumps(
                {
                    **told,
                    "processor": numerics.processor(),
                    **tried(shape, seed=1000 * number + cell),
                }
            ),
            flush=True,
        )


def tried(shape: Shape, seed: int) -> dict[str, Any]:
    """Return the probe's answer for a random model of that shape, and the truth."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    from tandem.model.load import make_exact
    from tandem.model.paths import path_of
    from tandem.model.probe import probe
    from tandem.model.schedule import random_module

    logging.set_verbosity_error()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(shape.architecture, **shape.config)
        unfit = [reason] if (reason := path_of(config, shape.name).gap(config, None)) else []
        if shape.variant:
            dtype = torch.bfloat16 if shape.variant.endswith("bfloat16") else torch.float32
            module = random_module(config, seed, dtype)
        else:
            module = AutoModelForCausalLM.from_config(config).float()
        model = make_exact(module)
    found = probe(model, seed)
    gap, tokens, threads_agree = lived(model, shape.longest, np.random.default_rng(seed))
    measured = [
        [line for line in lines if not line.startswith("MKL is not")]
        for lines in (unfit + found.parity, unfit + found.thread_dependent)
    ]
    return {
        "says_parity": not (unfit or found.parity),
        "says_threads": not (unfit or found.thread_dependent),
        "gap": gap,
        "tokens": tokens,
        "threads_agree": threads_agree,
        "measured_parity": not measured[0],
        "measured_threads": not measured[1],
        "found": (measured[0] + measured[1])[:3],
    }


def lived(model: Any, longest: int, rng: np.random.Generator) -> tuple[float, int, bool]:
    """(largest gap between engine and trainer, tokens sampled, whether one and two threads give the
    trainer the same bits)."""
    from tandem.trainer.pack import join, pack
    from tandem.types import Request, SamplingDistribution, SamplingParams
    from tests.support.parity import engine_for, sample_of

    requests, prompts = [], [int(n) for n in rng.choice(PROMPTS, 7)] + [longest]
    for number, length in enumerate(prompts):
        prompt = rng.integers(0, model.config.vocab_size, length).astype(np.int64)
        for sample in range(int(rng.integers(1, 4))):
            params = SamplingParams(max_new_tokens=int(rng.choice(ANSWERS)))
            requests.append(
                (
                    number,
                    Request(key=int(rng.integers(1 << 62)) + sample, prompt=prompt, params=params),
                )
            )
    completions = engine_for(model, max_batch=int(rng.integers(1, 12))).generate(
        [request for _, request in requests]
    )
    samples = [
        sample_of(request, completion, group)
        for (group, request), completion in zip(requests, completions, strict=True)
    ]
    gap, agree = 0.0, True
    for budget in (int(rng.integers(100, 700)), 4096):
        batches = pack(samples, budget)
        for batch, engine in zip(
            batches, join(batches, [c.logprobs for c in completions]), strict=True
        ):
            logprobs, same = passed(model, batch, SamplingDistribution(), gradients=budget == 4096)
            gap = float(np.max([gap, np.abs(logprobs - engine).max()]))  # np: a NaN must show
            agree &= same
    return gap, sum(len(completion.tokens) for completion in completions), agree


def passed(model: Any, batch: Any, sampling: Any, *, gradients: bool) -> tuple[np.ndarray, bool]:
    """(log-probs with the threads at hand, whether log-probs, and gradients, are the same with one
    thread and with two)."""
    import torch

    from tandem.model.forward import batch_logprobs
    from tandem.model.schedule import threads_of

    made = {}
    for threads in (1, 2):
        with threads_of(threads), torch.set_grad_enabled(gradients):
            logprobs, _ = batch_logprobs(model, batch, sampling)
            if gradients:
                (-logprobs.sum() / len(logprobs)).backward()
        made[threads] = [
            logprobs.detach(),
            *(p.grad for p in model.module.parameters() if p.grad is not None),
        ]
        model.module.zero_grad(set_to_none=True)
    equal = all(torch.equal(one, two) for one, two in zip(made[1], made[2], strict=True))
    return made[torch.get_num_threads()][0].numpy(), equal


if __name__ == "__main__":
    main(int(sys.argv[1]), list(map(int, sys.argv[2:])))
