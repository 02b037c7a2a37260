"""The engine: how sequences end, what is shared, what is refused, and that a request's result is
its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.model.logprobs import log_distribution
from tandem.runtime.errors import UserError
from tandem.runtime.rng import address, uniforms
from tandem.types import SamplingDistribution
from tests.support.engines import MODEL, decode, engine_of, facts, mixed_requests, request
from tests.support.tiny import exact_logits, exact_model, random_tokens, twins


def test_completion_ends_at_its_length_with_its_shapes():
    [completion] = engine_of().generate([request(max_new_tokens=6)])
    assert len(completion.tokens) == 6 and completion.stop_reason == "length"
    assert completion.tokens.dtype == np.int64 and completion.logprobs.dtype == np.float32
    versions = completion.weight_versions
    assert versions.tolist() == [0] * 6 and versions.dtype == np.int32
    assert (completion.logprobs < 0).all() and completion.text == decode(completion.tokens)


def test_stop_token_ends_the_completion_and_is_not_in_the_text():
    [free] = engine_of().generate([request(max_new_tokens=20)])
    stop = int(free.tokens[11])
    first = free.tokens.tolist().index(stop)
    [completion] = engine_of().generate([request(max_new_tokens=20, stop_token_ids=(96, stop))])
    assert completion.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert completion.text == decode(free.tokens[:first]) and completion.stop_reason == "stop"


def test_logprobs_are_of_the_tempered_and_filtered_distribution():
    way = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    [completion] = engine_of().generate([request(max_new_tokens=12, **way)])
    with torch.no_grad():
        [logits] = exact_logits(MODEL, [np.concatenate([[5, 9, 2], completion.tokens])])
    table = log_distribution(logits[2:-1], SamplingDistribution(**way)).numpy()
    assert np.array_equal(completion.logprobs, table[np.arange(12), completion.tokens])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "qwen3_moe"])
def test_greedy_decoding_gives_the_tokens_of_stock_transformers(kind):
    exact, stock = twins(kind)
    prompt = random_tokens(np.random.default_rng(3), 12)
    asked = request(prompt=prompt, max_new_tokens=24, temperature=0.0)
    [completion] = engine_of(exact).generate([asked])
    expected = stock.generate(
        torch.from_numpy(prompt)[None],
        attention_mask=torch.ones(1, 12, dtype=torch.int64),
        max_new_tokens=24,
        do_sample=False,
    )[0, 12:]
    assert completion.tokens.tolist() == expected.tolist()
    assert len(set(completion.tokens.tolist())) > 3


def test_token_t_is_drawn_with_the_uniform_of_its_key_and_t():
    [completion] = engine_of().generate([request(3, max_new_tokens=10)])
    with torch.no_grad():
        [logits] = exact_logits(MODEL, [np.concatenate([[5, 9, 2], completion.tokens])])
    cdf = logits[2:-1].double().softmax(-1).cumsum(-1).numpy()
    draws = uniforms(np.full(10, address("test", 3), np.uint64), np.arange(10))
    assert (cdf <= draws[:, None]).sum(1).tolist() == completion.tokens.tolist()


def test_cache_too_small_is_refused_with_the_needed_size():
    page = 2 * 2 * 2 * 16 * 4 * 128  # layers, keys and values, heads, head size, bytes, tokens
    assert len(engine_of(cache_bytes=page).generate([request(), request(1)])) == 2
    with pytest.raises(UserError, match="cannot hold one page") as error:
        engine_of(cache_bytes=page - 1)
    assert error.value.where == "rollout.cache_mb"
    assert "1 MiB for 128 tokens" in error.value.expected
    with pytest.raises(UserError, match="cannot hold one sequence") as error:
        engine_of(cache_bytes=2 * page - 1).generate([request(max_new_tokens=126)])
    assert "for 129 tokens" in error.value.expected


def test_a_sequence_longer_than_the_models_positions_is_refused():
    model = exact_model("llama", max_position_embeddings=20)
    assert len(engine_of(model).generate([request(max_new_tokens=17)])[0].tokens) == 17
    with pytest.raises(UserError, match="longer than the model can place") as error:
        engine_of(model).generate([request(max_new_tokens=18)])
    assert "21 tokens" in error.value.found and "20" in error.value.expected


def test_logprob_gap_is_zero_for_any_sampling_and_length():
    engine = engine_of()
    assert engine.logprob_gap() == 0.0 and engine._to_check is None
    for number, one in enumerate(mixed_requests()):
        engine.apply(number)
        engine.generate([one, *mixed_requests(number % 3)])
        assert engine._to_check is not None and engine.logprob_gap() == 0.0


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_checked_completion_depends_on_the_addresses_only(batch):
    engine, requests = engine_of(max_batch=batch), mixed_requests()
    engine.generate(requests[batch % 3 :] + requests[: batch % 3])
    assert engine._to_check.request.key == min(r.key for r in requests)


def test_checked_completion_is_new_and_of_these_weights():
    engine, requests = engine_of(), sorted(mixed_requests(), key=lambda r: r.key)
    engine.generate(requests[:3])  # an evaluation
    engine.generate(requests[5:])
    assert engine._to_check.request.key == requests[5].key
    engine.apply(1)
    assert engine.logprob_gap() == 0.0 and engine._to_check is None


def test_logprob_gap_shows_a_wrong_logprob():
    engine = engine_of()
    engine.generate(mixed_requests())
    engine._to_check.logprobs[-1] += 1e-6
    assert 0 < engine.logprob_gap() < 1e-5
    engine._to_check.logprobs[-1] = float("nan")
    assert np.isnan(engine.logprob_gap())


def test_logprob_gap_of_a_resumed_completion_skips_old_tokens():
    model = exact_model("qwen3", seed=5)
    engine = engine_of(model)
    [paused] = engine.generate([replace(request(max_new_tokens=20), max_tokens_now=7)])
    with torch.no_grad():
        model.head.weight.mul_(1.5)
    engine.apply(1)
    [whole] = engine.generate([replace(request(max_new_tokens=20), resume_from=paused)])
    assert whole.weight_versions.tolist() == [0] * 7 + [1] * 13
    assert engine.logprob_gap() == 0.0


def test_a_cache_without_memory_takes_it_again_and_gives_the_same_completions():
    engine = engine_of()
    first = [facts(c) for c in engine.generate(mixed_requests())]
    pages = engine.cache.keys[0].shape
    engine.cache.give_back()
    assert engine.cache.values == engine.cache.keys == ()
    assert engine.stats()["pages_cached"] == 0
    engine.apply(0)
    assert engine.cache.keys == ()  # until a step needs it
    assert [facts(c) for c in engine.generate(mixed_requests())] == first
    assert engine.cache.keys[0].shape == pages and engine.cache.allocations == 2
