"""P1 on the GPU's kernels: engine and policy over Triton; in the interpreter where there is no
GPU."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tandem.engine.engine import Engine
from tandem.model.forward import batch_logprobs
from tandem.model.load import make_exact
from tandem.runtime.rng import address
from tandem.train.pack import join, pack
from tandem.types import Request, SamplingParams
from tests.support.kernels import triton_everywhere
from tests.support.parity import sample_of, words
from tests.support.tiny import random_tokens, stock_model, tiny_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def triton_kernels():
    with triton_everywhere(), torch.no_grad():
        yield


SHAPE = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4}
if DEVICE == "cpu":  # the interpreter takes 20 s for more
    SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}


def model_of(kind, dtype):
    return make_exact(stock_model(tiny_config(kind, **SHAPE)).to(DEVICE, dtype))


def asked():
    rng = np.random.default_rng(0)
    shared, long = random_tokens(rng, 20), random_tokens(rng, 140)
    filtered = SamplingParams(max_new_tokens=3, temperature=0.8, top_p=0.9, repetition_penalty=1.2)
    params = SamplingParams(max_new_tokens=4), filtered
    prompts = [shared, shared, long, shared[:9]]
    return [
        Request(key=address("gpu", n), prompt=prompt, params=params[n % 2])
        for n, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_engine_and_policy_agree_to_the_bit_over_triton(kind, dtype):
    model, requests = model_of(kind, dtype), asked()
    engine = Engine(model, words, cache_bytes=1 << 21, max_batch=3, chunk_tokens=100)
    completions = engine.generate(requests)
    assert engine.stats()["prompt_tokens_cached"] > 0
    for params in {r.params for r in requests}:
        mine = [(r, c) for r, c in zip(requests, completions, strict=True) if r.params == params]
        batches = pack([sample_of(r, c, group) for group, (r, c) in enumerate(mine)], 400)
        for batch, engine in zip(
            batches, join(batches, [c.logprobs for _, c in mine]), strict=True
        ):
            logprobs, _ = batch_logprobs(model, batch, params)
            assert np.abs(logprobs.cpu().numpy() - engine).max() == 0.0


def test_the_kernels_agree_closely_with_those_of_the_cpu():
    model = model_of("qwen3", torch.float32)
    tokens, segments = (
        torch.from_numpy(random_tokens(np.random.default_rng(1), 40)),
        np.array([[0, 40, 0, 0]]),
    )
    ours = model.hidden(tokens, torch.arange(40), model.packed_plan(segments))
    stock = stock_model(tiny_config("qwen3", **SHAPE))
    theirs = stock.model(input_ids=tokens[None]).last_hidden_state[0]
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)
