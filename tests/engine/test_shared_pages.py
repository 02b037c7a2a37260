"""Samples of a prompt hold and read the same pages, and each request's result stays its own."""

import numpy as np
import pytest

from tests.support.engines import CountingModel, facts, finish, paged_engine, prompt, request
from tests.support.tiny import exact_model

pytestmark = pytest.mark.usefixtures("plain_kernels")
MODELS = {kind: exact_model(kind) for kind in ("qwen3", "mistral", "llama")}


class WatchedModel(CountingModel):
    """Notes of each of the engine's passes how many neighbours have their first page in common, as
    kernels that read it once want them."""

    def __init__(self, model):
        super().__init__(model)
        self.packed_plan, self.row_parts, self.widths = model.packed_plan, model.row_parts, []
        self.paged_plan, self.softcap = self.watched_plan, model.softcap

    def __call__(self, compute):
        return self.model(compute)

    def watched_plan(self, keys, values, runs):
        ends = np.flatnonzero(np.diff(runs.table[:, 0], append=-1))
        self.widths.append(np.diff(ends, prepend=-1).max())
        return self.model.paged_plan(keys, values, runs)


def alone(model, requests):
    return [facts(paged_engine(model).generate([one])[0]) for one in requests]


@pytest.mark.parametrize("kind", MODELS)
def test_groups_of_odd_sizes_give_what_each_request_gives_alone(kind):
    model, requests = WatchedModel(MODELS[kind]), []
    for number, (length, samples) in enumerate([(300, 5), (130, 1), (256, 3), (129, 7), (40, 2)]):
        for n in range(samples):
            more = {"max_new_tokens": 3 + 4 * n}
            requests.append(request(10 * number + n, prompt(length, number), **more))
    requests = [requests[n] for n in np.random.default_rng(0).permutation(len(requests))]
    engine = paged_engine(model)
    assert [facts(c) for c in engine.generate(requests)] == alone(MODELS[kind], requests)
    assert max(model.widths) >= 5 and engine.logprob_gap() == 0.0


def test_samples_of_two_prompts_in_turns_read_their_pages_together():
    model = WatchedModel(MODELS["qwen3"])
    requests = [request(n, prompt(200, n % 2), max_new_tokens=4) for n in range(8)]
    paged_engine(model).generate(requests)
    assert max(model.widths) == 4


def test_preempted_samples_give_what_they_give_alone():
    model, shared = WatchedModel(MODELS["qwen3"]), prompt(230)
    requests = [request(n, shared, max_new_tokens=40) for n in range(5)]
    engine = paged_engine(model, pages=8)
    assert [facts(c) for c in engine.generate(requests)] == alone(MODELS["qwen3"], requests)
    assert engine.stats()["preemptions"] > 0 and max(model.widths) >= 3
    assert engine.stats()["pages_in_use"] == 0


def test_samples_hold_one_copy_of_a_page_that_each_has_filled():
    engine, whole = paged_engine(MODELS["qwen3"]), prompt(256)
    group = [engine.submit(request(n, whole, max_new_tokens=8)) for n in range(6)]
    for _ in range(3):
        engine.step()
    assert all(one.page_table[:2] == group[0].page_table[:2] for one in group)
    assert len({one.page_table[2] for one in group}) == 6
    assert engine.stats()["pages_in_use"] == 2 + 6


def test_equal_completions_hold_the_pages_of_one():
    engine = paged_engine(MODELS["qwen3"])
    twins = [engine.submit(request(0, prompt(100), max_new_tokens=60)) for _ in range(3)]
    for _ in range(40):
        engine.step()
    assert len({one.page_table[0] for one in twins}) == 1
    assert engine.stats()["pages_in_use"] == 1 + 3
    assert len(set(finish(engine, twins))) == 1
    assert engine.stats()["pages_in_use"] == 0
