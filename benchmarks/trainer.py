"""The trainer's parts against the usual way of doing them: same weights, same tokens, one thread
count.

    python benchmarks/trainer.py MODEL_DIR        prints one JSON line

ragged    forward + backward of 8 sequences whose mean length is 45% of the longest: packed, against
          transformers with padding and SDPA, token mean of -log p in both. With and without
          activation checkpointing.
shared    forward + backward of 4 groups of 8 samples, prompts of 64 tokens and answers of 43: each
          prompt packed once for its group, against once for each sample.
logprobs  log-probs of 4,096 tokens and their gradients over a vocabulary of 49,152: in chunks (the
          gradient expected, as on policy, or the logits computed again), against full logits. Time
          in one process, alternating; peak memory (above what the inputs take) each in a process of
          its own.
adamw     an AdamW step over the model's shapes: fused, against torch's default; each alone, and
          with clipping.

Sides alternate; medians.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from machine import ceilings
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.config.schema import Config
from tandem.jobs.engines import prepare_process
from tandem.model.forward import batch_logprobs
from tandem.model.kernels import CPU
from tandem.model.load import ExactModel, load_model
from tandem.model.logprobs import Head, token_logprobs
from tandem.trainer.optimizer import Optimizer, Settings
from tandem.trainer.pack import pack
from tandem.types import Microbatch, Sample, SamplingDistribution

ROUNDS = 3
TOKENS, VOCABULARY, WIDTH = 4096, 49152, 576  # SmolLM2-135M's head
LENGTHS = (256, 180, 144, 104, 88, 64, 48, 38)  # mean 115 = 45% of the longest


def main() -> None:
    if sys.argv[1] == "--peak":
        print(json.dumps(peak(sys.argv[2])))
        return
    prepare_process(Config())
    result = {
        "bench": "trainer",
        **ceilings(),
        "ragged": ragged(sys.argv[1]),
        "shared": shared(sys.argv[1]),
    }
    result["logprobs"] = logprobs()
    print(json.dumps({**result, "adamw": adamw(sys.argv[1])}))


def alternate(sides: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median and least seconds of each side after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if number:
                times[name].append(time.perf_counter() - start)
    least = {f"{name}_least_s": min(values) for name, values in times.items()}
    return {f"{name}_s": statistics.median(values) for name, values in times.items()} | least


def ragged(path: str) -> dict[str, float]:
    stock, model = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train(),
        load_model(path),
    )
    rng = np.random.default_rng(0)
    documents = [rng.integers(5, 49000, length) for length in LENGTHS]
    samples = [
        Sample(tokens=d, loss_mask=np.arange(len(d)) > 0, group=i) for i, d in enumerate(documents)
    ]
    [batch] = pack(samples, 1 << 20)
    losses: dict[str, float] = {}
    sides = {
        "padded": lambda: losses.update(padded=padded_step(stock, documents)),
        "packed": lambda: losses.update(packed=packed_step(model, batch, checkpointing=False)),
        "checkpointed": lambda: losses.update(
            checkpointed=packed_step(model, batch, checkpointing=True)
        ),
    }
    seconds = alternate(sides)
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    return {**seconds, "tokens": sum(LENGTHS), "fill": sum(LENGTHS) / len(LENGTHS) / max(LENGTHS)}


def shared(path: str) -> dict[str, float]:
    model, rng = load_model(path), np.random.default_rng(0)
    samples = []
    for group in range(4):
        prompt = rng.integers(5, 49000, 64)
        for _ in range(8):
            tokens = np.concatenate([prompt, rng.integers(5, 49000, 43)])
            samples.append(
                Sample(tokens=tokens, loss_mask=np.arange(107) >= 64, prefix=64, group=group)
            )
    [once] = pack(samples, 1 << 20)
    [each] = pack([replace(sample, prefix=0) for sample in samples], 1 << 20)
    losses: dict[str, float] = {}
    sides = {
        "each": lambda: losses.update(each=packed_step(model, each, checkpointing=False)),
        "once": lambda: losses.update(once=packed_step(model, once, checkpointing=False)),
    }
    seconds = alternate(sides)
    assert losses["once"] == losses["each"], losses
    return {**seconds, "rows_each": len(each.tokens), "rows_once": len(once.tokens)}


def padded_step(model: torch.nn.Module, documents: list[np.ndarray]) -> float:
    longest = max(map(len, documents))
    tokens = torch.zeros(len(documents), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, document in enumerate(documents):
        tokens[row, : len(document)] = torch.from_numpy(document)
        mask[row, : len(document)] = 1
    loss = model(
        input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)
    ).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    return float(loss)


def packed_step(model: ExactModel, batch: Microbatch, *, checkpointing: bool) -> float:
    model.checkpointing = checkpointing
    known = -(torch.ones(len(batch.targets)) / len(batch.targets))
    loss = -batch_logprobs(model, batch, SamplingDistribution(), known, entropy=False)[
        0
    ].sum() / len(batch.targets)
    loss.backward()
    model.module.zero_grad(set_to_none=True)
    return float(loss)


def head() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, output projection, targets, and the gradients that arrive at the log-probs."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH) / 24
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.randint(VOCABULARY, (TOKENS,)),
        torch.randn(TOKENS),
    )


def in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor, above: Tensor) -> None:
    token_logprobs(
        Head(hidden, weight, CPU.pack(weight)),
        targets,
        SamplingDistribution(),
        None,
        above,
        entropy=False,
    )[0].backward(above)
    hidden.grad = weight.grad = None


def computed_again(hidden: Tensor, weight: Tensor, targets: Tensor, above: Tensor) -> None:
    token_logprobs(
        Head(hidden, weight, CPU.pack(weight)), targets, SamplingDistribution(), entropy=False
    )[0].backward(above)
    hidden.grad = weight.grad = None


def in_full(hidden: Tensor, weight: Tensor, targets: Tensor, above: Tensor) -> None:
    logprobs = (hidden @ weight.t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    logprobs.backward(above)
    hidden.grad = weight.grad = None


SIDES = {"chunks": in_chunks, "again": computed_again, "full": in_full}


def logprobs() -> dict[str, float]:
    inputs = head()
    seconds = alternate(
        {name: lambda side=side: side(*inputs) for name, side in SIDES.items()}, rounds=5
    )
    peaks = {}
    for name in SIDES:
        done = subprocess.run(
            [sys.executable, __file__, "--peak", name], capture_output=True, text=True, check=True
        )
        peaks[f"{name}_mib"] = json.loads(done.stdout)
    return {**seconds, **peaks}


def peak(name: str) -> float:
    """MiB above inputs, gradients and the pack, which both sides hold or could hold."""
    inputs = head()
    warm = (inputs[0][:64].detach().requires_grad_(), inputs[1], inputs[2][:64], inputs[3][:64])
    SIDES[name](*warm)
    before = high_water()
    SIDES[name](*inputs)
    return high_water() - before


def high_water() -> float:
    """MiB; not getrusage, which a process inherits from the one that started it."""
    [line] = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return int(line.split()[1]) / 1024


def adamw(path: str) -> dict[str, float]:
    weights = {name: p.detach().clone() for name, p in load_model(path).module.named_parameters()}
    shapes = {name: torch.nn.Parameter(weight) for name, weight in weights.items()}
    ours = Optimizer(
        shapes, Settings(learning_rate=1e-6, total_steps=1, weight_decay=0.01, betas=(0.9, 0.999))
    )
    copies = [torch.nn.Parameter(weight.clone()) for weight in weights.values()]
    theirs = torch.optim.AdamW(copies, lr=1e-6)
    gradients = [torch.randn_like(p) for p in copies]

    def given(parameters: Iterable[torch.nn.Parameter]) -> None:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(copies, 1.0)
        theirs.step()

    sides = {
        "default": (copies, clipped),
        "tandem": (shapes.values(), ours.update),
        "default_alone": (copies, theirs.step),
        "tandem_alone": (shapes.values(), ours.adam.step),
    }
    return alternate(
        {name: lambda side=side: (given(side[0]), side[1]()) for name, side in sides.items()},
        rounds=7,
    )


if __name__ == "__main__":
    main()
