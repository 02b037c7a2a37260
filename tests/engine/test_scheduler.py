"""The engine step by step: chunks, preemption, cancellation, the queue, weight updates and growing
conversations."""

import numpy as np
import pytest

from tandem.engine.scheduler import QueueFull
from tests.support.engines import (
    MODEL,
    CountingModel,
    decode,
    facts,
    finish,
    paged_engine,
    prompt,
    request,
)
from tests.support.tiny import exact_model


def test_a_long_prompt_runs_in_chunks_beside_those_that_decode():
    model = CountingModel(MODEL)
    engine = paged_engine(model, chunk_tokens=50)
    first = engine.submit(request(0, max_new_tokens=20))
    engine.step()
    second = engine.submit(request(1, prompt(180), max_new_tokens=4))
    finish(engine, [first, second])
    # each pass one token of the first and 50 of the second's prompt, as long as that lasts
    assert model.passes[:6] == [3, 51, 51, 51, 31, 2]


def test_full_queue_refuses_until_there_is_room():
    engine = paged_engine(max_batch=1, max_queue=2)
    running = [engine.submit(request(0))]
    engine.step()
    running += [engine.submit(request(n)) for n in (1, 2)]
    with pytest.raises(QueueFull, match="2 requests are waiting, at most 2"):
        engine.submit(request(3))
    finish(engine, running[:1])
    engine.step()
    assert engine.submit(request(3)) is not None
    engine = paged_engine(max_batch=2, max_queue=3)
    assert len(engine.generate([request(n) for n in range(12)])) == 12


def test_nobody_starves_behind_a_stream_of_short_requests():
    engine = paged_engine(pages=4, max_batch=4)
    long = engine.submit(request(0, prompt(380), max_new_tokens=100))  # needs the whole cache
    passes = 0
    while long.completion is None and passes < 600:
        if engine.stats()["waiting"] < 8:
            engine.submit(request(passes + 1, max_new_tokens=3))
        engine.step()
        passes += 1
    assert long.completion is not None
    assert passes < 300


def test_a_big_request_that_waits_is_not_passed_by_small_ones():
    engine = paged_engine(pages=4, max_batch=8)
    small = [engine.submit(request(n, prompt(20, n), max_new_tokens=30)) for n in range(3)]
    engine.step()
    big = engine.submit(request(10, prompt(380), max_new_tokens=100))
    later = engine.submit(request(11, prompt(20, 7), max_new_tokens=5))
    finish(engine, small)
    assert not later.tokens
    finish(engine, [big, later])


def test_cancelled_request_frees_its_pages_and_keeps_its_tokens():
    engine = paged_engine()
    running, waiting = engine.submit(request(0, max_new_tokens=50)), engine.submit(request(1))
    other = engine.submit(request(2, prompt(40)))
    for _ in range(5):
        engine.step()
    engine.cancel(running)
    assert running.completion.stop_reason == "cancelled" and len(running.completion.tokens) == 5
    assert running.completion.text == decode(running.completion.tokens)
    engine.cancel(running)  # ended already: nothing happens
    [same] = paged_engine().generate([request(0, max_new_tokens=50)])
    assert same.tokens[:5].tolist() == running.completion.tokens.tolist()
    finish(engine, [other, waiting])
    assert engine.stats()["pages_in_use"] == 0 and not engine.has_work


def test_cancelling_the_leader_of_a_shared_prompt_stops_no_other():
    engine, shared = paged_engine(chunk_tokens=32, max_batch=3), prompt(200)
    group = [engine.submit(request(n, shared, max_new_tokens=4)) for n in range(5)]
    engine.step()
    engine.cancel(group[0])  # in the middle of the prompt that the others wait for
    engine.cancel(group[4])
    results = finish(engine, group[1:4])
    assert results == [facts(paged_engine().generate([one.request])[0]) for one in group[1:4]]
    assert len(group[4].completion.tokens) == 0 and engine.stats()["pages_in_use"] == 0


def test_growing_conversation_computes_only_its_new_tokens():
    model = CountingModel(MODEL)
    engine, history = paged_engine(model), prompt(150)
    for turn in range(4):
        [completion] = engine.generate([request(turn, history, max_new_tokens=10)])
        if turn:
            # the observation of 20 tokens, and the last sampled one, whose keys nobody had needed
            # yet
            assert model.passes[0] == 21
        model.passes.clear()
        history = np.concatenate([history, completion.tokens, prompt(20, turn)])
    [fresh] = paged_engine().generate([request(9, history)])
    assert facts(engine.generate([request(9, history)])[0]) == facts(fresh)


@pytest.fixture
def two_weights():
    model, other = exact_model("qwen3"), exact_model("qwen3", seed=1)
    old = {name: weight.clone() for name, weight in model.named_weights().items()}
    return model, old, other.named_weights()


def test_apply_finishes_requests_by_the_old_weights(two_weights):
    model, _, new = two_weights
    engine = paged_engine(model)
    begun = engine.submit(request(0, prompt(140), max_new_tokens=12))
    for _ in range(5):
        engine.step()
    later = engine.submit(request(1))
    engine.apply(1, lambda: model.load_weights(new))
    assert begun.completion is not None
    assert begun in engine.step()
    finish(engine, [begun, later])
    assert begun.completion.weight_versions.tolist() == [0] * 12
    assert later.completion.weight_versions.tolist() == [1] * 8
    [alone] = paged_engine(exact_model("qwen3")).generate([begun.request])
    assert begun.completion.tokens.tolist() == alone.tokens.tolist()


def test_weights_changed_without_apply_are_an_error(two_weights):
    model, _, new = two_weights
    engine = paged_engine(model)
    engine.submit(request())
    engine.step()
    model.load_weights(new)
    with pytest.raises(RuntimeError, match="weights changed under running requests"):
        engine.step()


def test_many_requests_in_a_small_cache_leave_no_page_in_use():
    engine, rng = paged_engine(pages=6, max_batch=5), np.random.default_rng(0)
    for _ in range(10):
        drawn = rng.integers((0, 1, 0, 1), (9, 300, 3, 6), (12, 4)).tolist()
        engine.generate([request(n, prompt(*p), max_new_tokens=most) for n, *p, most in drawn])
        stats = engine.stats()
        assert stats["pages_in_use"] == stats["cache_bytes_in_use"] == 0
        assert engine.cache.cached + len(engine.cache._free) == 6
