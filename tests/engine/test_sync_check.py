"""The check of a worker's engine after every sync, by a fixed sequence that the trainer scored."""

import math

import numpy as np
import pytest

from tandem.config.schema import RL, Config
from tandem.engine.sync_check import LENGTH, make_probe
from tandem.rollout_workers.worker import Server
from tandem.runtime.errors import UserError
from tandem.trainer.parity import gap_limit
from tandem.weights.hashing import combine
from tests.support.engines import engine_of, finish
from tests.support.tiny import exact_model
from tests.support.working import request

VERSION = 3


class ShiftedEngine:
    """An engine whose log-probs are off by so many nats. Implements worker.ServedEngine as far as a
    sync goes."""

    model, has_work = None, False

    def __init__(self, shift):
        self.shift = shift

    def apply(self, version, load):
        self.version = version

    def weight_digests(self, digest):
        return {}

    def score(self, tokens):
        return true_logprobs(tokens) + np.float32(self.shift)

    def logprob_gap(self):
        raise AssertionError("it had a probe")


class Sent(list):
    """A channel that keeps what it is given."""

    last_sent, send, descriptors = 0.0, list.append, ()


def true_logprobs(tokens):
    return -(tokens[1:] % 7).astype(np.float32)


def synced(shift, limit=1e-3):
    """Return a worker's answers to new weights, and to a question for its gap then."""
    channel = Sent()
    server = Server(channel, ShiftedEngine(shift), lambda source, descriptors: {}, 60.0)
    probe = make_probe(true_logprobs, vocabulary=100, longest=512, limit=limit)
    server._handle({"apply": VERSION, "from": {"digest": "xxh3", "digests": {}, "probe": probe}})
    server._handle({"check": VERSION})
    return list(channel)


@pytest.mark.parametrize("shift", [0.0, 1e-5, -5e-4])
def test_a_small_gap_is_the_answer(shift):
    applied, checked = synced(shift)
    assert applied == {"applied": VERSION, "hash": combine({}), "differ": []}
    assert checked == {"checked": VERSION, "gap": pytest.approx(abs(shift), rel=1e-2)}


def test_an_idle_engine_gives_its_memory_after_the_check_and_a_busy_one_keeps_it():
    engine = engine_of(exact_model("qwen3"))
    server = Server(Sent(), engine, lambda source, descriptors: {}, 60.0, rests=True)
    [first] = engine.generate([request(0)])
    other = engine.submit(request(1))
    engine.step()
    server._handle({"check": 0})
    assert engine.cache.keys and engine.has_work
    finish(engine, [other])
    server._handle({"check": 0})
    assert not engine.cache.keys
    [again] = engine.generate([request(0)])
    assert again.tokens.tolist() == first.tokens.tolist() and engine.cache.keys


@pytest.mark.parametrize("shift", [0.27, -2.4, 2e-3, np.nan])
def test_a_gap_above_the_bound_stops_the_run_before_a_token_is_sampled(shift):
    with pytest.raises(UserError, match="does not run the trainer's model") as error:
        synced(shift)
    assert f"{abs(shift):.3g} nats" in error.value.found and "tied head" in error.value.next
    assert error.value.where == f"after the sync of weights {VERSION}"


def test_the_bound_is_that_of_the_steps_own_tokens():
    dtype = exact_model("qwen3").dtype
    assert gap_limit(Config(), dtype) == 1e-3
    assert gap_limit(Config(rl=RL(max_logprob_error=1.05)), dtype) == math.log(1.05)


def test_the_trainer_scores_a_sequence_that_has_room():
    engine = engine_of(exact_model("qwen3"))
    probe = make_probe(engine.score, vocabulary=90, longest=10, limit=1.0)
    assert len(probe["tokens"]) == 9 and len(probe["logprobs"]) == 8
    whole = make_probe(engine.score, vocabulary=90, longest=512, limit=1.0)
    assert len(whole["tokens"]) == len(set(whole["tokens"])) == LENGTH
    assert whole["logprobs"][:8] == probe["logprobs"]  # a token's is of those before it
    assert all(np.isfinite(whole["logprobs"])) and max(whole["logprobs"]) < 0
