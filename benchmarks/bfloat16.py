"""bfloat16 against float32 on this CPU: decode of SmolLM2, and its forward and backward pass.

    python benchmarks/bfloat16.py MODEL      prints one JSON line

Decode: 8 and 32 sequences of 64 prompt tokens, medians of the steps in which all decode. Training:
log-probs and gradients of 4,096 tokens in sequences of 256, one microbatch. Both types take turns.
"""

import json
import sys
import time

import numpy as np
import torch
from machine import ceilings

from tandem.config.schema import Config
from tandem.engine.engine import Engine
from tandem.engine.scheduler import RunningSequence
from tandem.jobs.engines import prepare_process
from tandem.model.forward import batch_logprobs
from tandem.model.load import ExactModel, load_model
from tandem.model.onednn import bfloat16_unit
from tandem.model.placement import Placement
from tandem.trainer.pack import pack
from tandem.types import Microbatch, Request, Sample, SamplingDistribution, SamplingParams

ROUNDS = 5
NEW, TURN = 64, 8  # tokens of a completion; steps of an engine before it is the other one's turn


def main() -> None:
    prepare_process(Config())
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    models = {
        name: load_model(sys.argv[1], place=Placement(torch.device("cpu"), dtype))
        for name, dtype in types.items()
    }
    batch = microbatch()
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            seconds[name].append(forward_backward(model, batch))
    result = {
        "bench": "bfloat16",
        **ceilings(),
        "unit": bfloat16_unit(),
        "train_s": {name: float(np.median(times)) for name, times in seconds.items()},
        "decode_tok_s": {batch: decode(models, batch) for batch in (8, 32)},
    }
    print(json.dumps(result))


def microbatch() -> Microbatch:
    rng = np.random.default_rng(0)
    samples = [
        Sample(tokens=rng.integers(0, 4096, 257), loss_mask=np.arange(257) >= 1, group=group)
        for group in range(16)
    ]
    [batch] = pack(samples, 1 << 14)
    return batch


def forward_backward(model: ExactModel, batch: Microbatch) -> float:
    start = time.perf_counter()
    expected = -torch.ones(len(batch.targets)) / len(batch.targets)
    logprobs, _ = batch_logprobs(model, batch, SamplingDistribution(), expected, entropy=False)
    (logprobs * expected).sum().backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.grad = None
    return time.perf_counter() - start


def decode(models: dict[str, ExactModel], batch: int) -> dict[str, float]:
    prompts, params = (
        np.random.default_rng(0).integers(0, 500, (batch, 64)),
        SamplingParams(max_new_tokens=NEW),
    )
    requests = [Request(key=n, prompt=tokens, params=params) for n, tokens in enumerate(prompts)]
    engines = {
        name: Engine(model, lambda tokens: "", cache_bytes=3 << 29, max_batch=batch)
        for name, model in models.items()
    }
    asked = {name: [engine.submit(r) for r in requests] for name, engine in engines.items()}
    steps: dict[str, list[float]] = {name: [] for name in models}
    while any(engine.has_work for engine in engines.values()):
        for name, engine in engines.items():
            steps[name] += decode_steps(engine, asked[name])
    return {name: batch / float(np.median(times)) for name, times in steps.items()}


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
