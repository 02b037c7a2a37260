"""P1: the engine's log-prob of a sampled token equals the trainer's, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.trainer.optimizer import Optimizer, Settings
from tests.support.parity import CONFIGS, engine_for, largest_gap, random_model, random_requests

BFLOAT16 = [(name, torch.bfloat16) for name in ("qwen3", "mistral", "qwen3_moe")]
TYPES = [*((name, torch.float32) for name in CONFIGS), *BFLOAT16]


@pytest.mark.parametrize(("name", "dtype"), TYPES)
def test_engine_and_policy_agree_in_gradient_mode(name, dtype, threads):
    model = random_model(name, dtype=dtype)
    requests = random_requests(np.random.default_rng(1), prompts=7, longest=150, group=3)
    completions = engine_for(model, max_batch=8).generate(requests)
    assert largest_gap(model, requests, completions, 400, gradients=True) == 0.0


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_engine_and_policy_agree_at_two_thousand_tokens(name):
    model = random_model(name)
    requests = random_requests(np.random.default_rng(2), prompts=3, longest=2000, group=2)
    assert max(len(r.prompt) for r in requests) > 1000
    completions = engine_for(model).generate(requests)
    assert largest_gap(model, requests, completions, 4096, gradients=False) == 0.0


@pytest.mark.parametrize(("name", "dtype"), TYPES)
def test_engine_and_policy_agree_after_optimizer_steps(name, dtype):
    model = random_model(name, dtype=dtype)
    optimizer = Optimizer(
        dict(model.module.named_parameters()), Settings(learning_rate=1e-2, total_steps=9)
    )
    engine = engine_for(model)
    seen = []
    for step in range(3):
        requests = random_requests(np.random.default_rng(step), prompts=4, longest=60, group=2)
        completions = engine.generate(requests)
        seen.append(engine.generate(requests[:1])[0].logprobs)
        assert largest_gap(model, requests, completions, 300, gradients=True) == 0.0
        optimizer.update()
    # the weights did reach the engine: the same requests score differently now
    first = random_requests(np.random.default_rng(0), prompts=4, longest=60, group=2)[:1]
    assert not np.array_equal(engine.generate(first)[0].logprobs, seen[0])


def test_a_trainer_at_another_temperature_is_seen():
    model = random_model("qwen3")
    requests = random_requests(np.random.default_rng(1), prompts=7, longest=50, group=2)
    completions = engine_for(model).generate(requests)
    other = [replace(request, params=requests[0].params) for request in requests]
    assert largest_gap(model, other, completions, 400, gradients=False) > 0.0
