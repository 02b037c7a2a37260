"""Tokens that may not be sampled: never drawn, without probability, and nobody else's business."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.model.logprobs import log_distribution
from tandem.types import SamplingDistribution
from tests.support.engines import MODEL, engine_of, facts, mixed_requests, request
from tests.support.tiny import VOCAB, exact_logits

ENDS = tuple(range(VOCAB // 2))  # half of the vocabulary ends a turn


def test_no_stop_token_is_sampled_before_min_tokens():
    ways = [{}, {"temperature": 0.0}, {"top_k": 2}, {"min_p": 0.9}] * 4
    ends = {"max_new_tokens": 12, "stop_token_ids": ENDS, "min_tokens": 7}
    asked = [request(n, **ends, **way) for n, way in enumerate(ways)]
    completions = engine_of().generate(asked)
    for completion in completions:
        assert len(completion.tokens) > 7 and not set(completion.tokens[:7].tolist()) & {*ENDS}
    assert any(completion.stop_reason == "stop" for completion in completions)


def test_masked_logprobs_are_of_what_is_left():
    way = {"temperature": 0.6, "top_p": 0.9}
    one = request(max_new_tokens=9, stop_token_ids=ENDS, min_tokens=9, **way)
    [completion] = engine_of().generate([one])
    with torch.no_grad():
        [logits] = exact_logits(MODEL, [np.concatenate([[5, 9, 2], completion.tokens])])
    logits = logits[2:-1].clone()
    logits[:, : VOCAB // 2] = float("-inf")
    table = log_distribution(logits, SamplingDistribution(**way))
    expected = table[torch.arange(9), torch.from_numpy(completion.tokens)]
    assert np.array_equal(completion.logprobs, expected.numpy())


class Alternating:
    """Even and odd tokens by turns."""

    def allowed(self, tokens):
        return np.arange(VOCAB) % 2 == len(tokens) % 2


def test_mask_of_a_request_is_asked_before_each_token():
    for way in ({}, {"temperature": 0.0}, {"top_p": 0.3, "repetition_penalty": 1.3}):
        one = replace(request(max_new_tokens=12, **way), mask=Alternating())
        [completion] = engine_of().generate([one])
        assert (completion.tokens % 2).tolist() == [0, 1] * 6
        assert np.isfinite(completion.logprobs).all()


@pytest.mark.parametrize("fields", [{"stop_token_ids": ENDS, "min_tokens": 30}, {}])
def test_masks_leave_other_requests_their_bits(fields):
    plain = mixed_requests()
    alone = [facts(completion) for completion in engine_of().generate(plain)]
    masked = [
        replace(one, params=replace(one.params, **fields), mask=None if fields else Alternating())
        for one in mixed_requests()
    ]
    engine = engine_of()
    both = engine.generate([one for pair in zip(plain, masked, strict=True) for one in pair])
    assert [facts(completion) for completion in both[::2]] == alone
    # the check against the trainer, which knows no masks, takes a request without one
    assert not engine._to_check.masked and engine.logprob_gap() == 0.0
