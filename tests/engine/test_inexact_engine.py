"""The engine over transformers' own cache: its log-probs are those of a whole pass of transformers
within rounding, and a completion does not depend on its company."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.engine.engine import make_engine
from tandem.engine.inexact_engine import InexactEngine
from tandem.model.inexact import make_inexact
from tandem.types import Request, SamplingParams
from tests.support.architectures import INEXACT, by_need, inexact, stock
from tests.support.engines import finish
from tests.support.parity import random_requests, words
from tests.support.tiny import stock_logits

GAP = 1e-4  # nats; they are some 1e-5


def engine_of(model, **sizes):
    sizes = {"cache_bytes": 64 << 20, "max_batch": 64, **sizes}
    engine = make_engine(model, words, **sizes)
    assert isinstance(engine, InexactEngine)
    return engine


def requests_of(seed, prompts=4, group=3):
    return random_requests(np.random.default_rng(seed), prompts=prompts, longest=60, group=group)


@pytest.mark.parametrize("name", by_need(INEXACT))
def test_log_probs_are_those_of_a_whole_pass(name):
    model, twin = inexact(name), stock(name)
    requests, engine = requests_of(1), engine_of(model, max_batch=5)
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        params = request.params
        assert params.temperature and len(completion.tokens) <= params.max_new_tokens
        tokens = np.concatenate([request.prompt, completion.tokens])
        with torch.no_grad():
            logits = stock_logits(twin, tokens[:-1])[len(request.prompt) - 1 :]
        if params.top_k or params.top_p < 1.0:
            continue
        table = (logits / params.temperature).log_softmax(-1).numpy()
        expected = table[range(len(completion.tokens)), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, expected, atol=GAP)
    assert 0 <= engine.logprob_gap() <= GAP


@pytest.mark.parametrize("name", by_need(INEXACT))
def test_completion_has_the_same_bits_in_any_company(name):
    """Some requests come a step later, in another order."""
    model, requests = inexact(name), requests_of(2, group=9)
    together, random = engine_of(model).generate(requests), np.random.default_rng(0)
    engine, order = engine_of(model, max_batch=30), random.permutation(len(requests))
    sequences = {n: engine.submit(requests[n]) for n in order[:7]}
    engine.step()
    sequences |= {n: engine.submit(requests[n]) for n in order[7:]}
    finish(engine, sequences.values())
    for number, expected in enumerate(together):
        found = sequences[number].completion
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert np.array_equal(found.logprobs, expected.logprobs)


def test_paused_request_goes_on_as_if_it_had_not_paused():
    model = inexact("qwen3_next")
    request = Request(key=5, prompt=np.arange(9), params=SamplingParams(max_new_tokens=12))
    [whole] = engine_of(model).generate([request])
    [begun] = engine_of(model).generate([replace(request, max_tokens_now=5)])
    assert begun.stop_reason == "paused"
    [ended] = engine_of(model).generate([replace(request, resume_from=begun)])
    assert ended.tokens.tolist() == whole.tokens.tolist()


def test_prompt_is_scored():
    model, twin, prompt = inexact("qwen3_5_text"), stock("qwen3_5_text"), np.arange(5, 30)
    params = SamplingParams(max_new_tokens=2, prompt_logprobs=1)
    engine = engine_of(model)
    sequence = engine.submit(Request(key=1, prompt=prompt, params=params))
    finish(engine, [sequence])
    found = np.concatenate([part.logprobs for part in sequence.prompt_scores])
    with torch.no_grad():
        table = stock_logits(twin, prompt)[:-1].log_softmax(-1).numpy()
    np.testing.assert_allclose(found, table[range(24), prompt[1:]], atol=GAP)


def test_requests_are_finished_before_new_weights():
    engine = engine_of(inexact("mamba2"))
    sequences = [engine.submit(request) for request in requests_of(3, prompts=2)]
    for _ in range(3):
        engine.step()
    engine.apply(1)
    finish(engine, sequences)
    longest = max((s.completion for s in sequences), key=lambda c: len(c.tokens))
    assert set(longest.weight_versions.tolist()) == {0}


def test_cancelled_request_leaves_its_batch():
    model, params = inexact("mamba2"), SamplingParams(max_new_tokens=10)
    requests = [Request(key=n, prompt=np.arange(7), params=params) for n in range(3)]
    expected = engine_of(model).generate(requests)
    engine = engine_of(model)
    sequences = [engine.submit(request) for request in requests]
    engine.step()
    engine.cancel(sequences[1])
    finish(engine, sequences)
    assert sequences[1].completion.stop_reason == "cancelled"
    assert len(sequences[1].completion.tokens) == 1
    for number in (0, 2):
        assert sequences[number].completion.tokens.tolist() == expected[number].tokens.tolist()
    assert engine.stats()["pages_in_use"] == 0


def test_model_without_a_cache_computes_whole_sequences():
    model = make_inexact(stock("qwen3_5_text"), caches=False)
    [found] = engine_of(model).generate(requests_of(4, prompts=1, group=1))
    [expected] = engine_of(inexact("qwen3_5_text")).generate(requests_of(4, prompts=1, group=1))
    assert found.tokens.tolist() == expected.tokens.tolist()
