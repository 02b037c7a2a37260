"""Pages behind a sliding window: a sequence gives them up, and its bits stay."""

import numpy as np
import pytest

from tests.support.engines import facts, paged_engine, request
from tests.support.tiny import exact_model, random_tokens

POSITIONS = {"max_position_embeddings": 1024}
WINDOW = 200  # tokens, which lie in 3 pages at most


@pytest.fixture(scope="module")
def model():
    return exact_model("mistral", sliding_window=WINDOW, **POSITIONS)


def long_requests(*lengths):
    """Samples of prompts of these lengths that end in page 8; equal lengths share a prompt."""
    rng = np.random.default_rng(0)
    prompts = {length: random_tokens(rng, length) for length in lengths}
    return [
        request(n, prompts[length], max_new_tokens=900 + 10 * n - length)
        for n, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("chunk_tokens", [2048, 90])
def test_sequences_fit_where_their_windows_do_and_have_the_same_bits(model, chunk_tokens):
    requests = long_requests(300, 310, 520, 520)
    engine = paged_engine(model, 17, chunk_tokens=chunk_tokens)  # all of them have 4 x 8 pages
    completions = engine.generate(requests)
    assert engine.stats()["preemptions"] == 0 and engine.stats()["pages_in_use"] == 0
    assert engine.logprob_gap() == 0.0
    roomy = paged_engine(model, 64)
    assert [facts(c) for c in completions] == [facts(roomy.generate([r])[0]) for r in requests]


def test_a_preempted_sequence_gives_up_what_it_still_holds(model):
    requests = long_requests(90, 100, 110, 110)
    engine, roomy = paged_engine(model, 9), paged_engine(model, 64)
    completions = [facts(completion) for completion in engine.generate(requests)]
    assert engine.stats()["preemptions"] > 0 and engine.stats()["pages_in_use"] == 0
    assert completions == [facts(completion) for completion in roomy.generate(requests)]


@pytest.mark.parametrize("kind", ["qwen2 half windowed", "llama"])
def test_pages_that_one_layer_sees_are_kept(kind):
    engine = paged_engine(exact_model(kind, **POSITIONS), 64)
    sequence = engine.submit(request(0, random_tokens(np.random.default_rng(0), 600)))
    engine.step()
    assert engine.stats()["pages_in_use"] == len(sequence.page_table) == 5
