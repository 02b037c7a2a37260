"""Log-probs of a prompt: the trainer's, to the last bit, whatever the chunks, pages and
neighbours."""

import numpy as np
import pytest
import torch

from tandem.engine.packed import packed_logprobs
from tandem.model.logprobs import log_distribution
from tandem.types import SamplingDistribution
from tests.support.engines import (
    MODEL,
    facts,
    finish,
    mixed_requests,
    paged_engine,
    prompt,
    request,
)
from tests.support.tiny import exact_logits

PROMPT = prompt(300, seed=3).tolist()


def run(requests, *, chunk_tokens=2048, pages=64):
    """Return the sequences of requests that run together, once they have ended."""
    engine = paged_engine(pages=pages, chunk_tokens=chunk_tokens)
    sequences = [engine.submit(one) for one in requests]
    finish(engine, sequences)
    return sequences, engine


def columns(sequence):
    return [np.concatenate(parts) for parts in zip(*sequence.prompt_scores, strict=True)]


@pytest.mark.parametrize("chunk_tokens", [7, 50, 2048])
def test_prompt_logprobs_are_the_trainers(chunk_tokens):
    scored = request(1, PROMPT, prompt_logprobs=3, temperature=0.5, top_k=4)
    plain, alike = mixed_requests(), request(2, PROMPT)
    sequences, _ = run([alike, *plain, scored], chunk_tokens=chunk_tokens)
    logprobs, ranks, top_tokens, top_logprobs = columns(sequences[-1])
    expected = packed_logprobs(MODEL, np.array(PROMPT[:1]), np.array(PROMPT[1:]))
    assert logprobs.tobytes() == expected.tobytes()
    with torch.no_grad():
        [logits] = exact_logits(MODEL, [np.array(PROMPT)])
    table = log_distribution(logits[:-1].float(), SamplingDistribution()).numpy()
    assert np.allclose(table, logits[:-1].float().log_softmax(-1).numpy(), atol=1e-5)
    assert np.array_equal(ranks, (table >= logprobs[:, None]).sum(-1)) and len(set(ranks)) > 20
    assert np.array_equal(np.take_along_axis(table, top_tokens, 1), top_logprobs)
    assert np.array_equal(top_logprobs, -np.sort(-table, 1)[:, :3])


def test_scoring_changes_no_completion_and_survives_preemption():
    plain, scoring = (
        [request(n, [n, *PROMPT[:120]], max_new_tokens=30, **more) for n in range(6)]
        for more in ({}, {"prompt_logprobs": 0})
    )
    alone, _ = run(plain)
    together, engine = run(scoring, pages=4, chunk_tokens=64)
    assert engine.scheduler.preemptions
    assert [facts(s.completion) for s in together] == [facts(s.completion) for s in alone]
    for number, sequence in enumerate(together):
        prompt = np.array([number, *PROMPT[:120]])
        assert np.array_equal(columns(sequence)[0], packed_logprobs(MODEL, prompt[:1], prompt[1:]))


def test_weights_that_change_under_a_prompt_score_it_anew():
    _, engine = run([])
    engine.scheduler.chunk_tokens = 100
    sequence = engine.submit(request(1, PROMPT, prompt_logprobs=0))
    engine.step()
    assert len(columns(sequence)[0]) == 100
    engine.weight_version = 1
    finish(engine, [sequence])
    assert len(columns(sequence)[0]) == len(PROMPT) - 1
