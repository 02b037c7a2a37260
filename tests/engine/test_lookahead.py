"""Decoding one step ahead of the host: at every moment the engine is as it is without that.

The CPU's kernels run the very step that a GPU replays, and a captured step is stood in for by its
function. `tests/gpu` runs it over Triton, and captured for good where there is a GPU.
"""

import hashlib
from collections import Counter
from functools import cache, partial

import numpy as np
import pytest
import torch

from tandem.engine import lookahead, scheduler
from tandem.engine.decode import DecodeStep, padded_batch
from tandem.engine.graphs import StepGraphs
from tandem.engine.lookahead import DecodeInputs, Lookahead
from tandem.engine.page_cache import PageCache
from tandem.engine.scheduler import Work
from tandem.model.paged_attention import Runs
from tandem.runtime.rng import address
from tandem.types import Request, SamplingParams
from tests.support.engines import as_it_is, facts, paged_engine, request
from tests.support.tiny import exact_model, random_tokens

SHAPE = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPE |= {"num_hidden_layers": 1, "intermediate_size": 32}
MODEL = exact_model("qwen3", **SHAPE)
PAGE_BYTES = PageCache(MODEL, 1 << 24).page_bytes
PROMPTS = [random_tokens(np.random.default_rng(n), n) for n in (1, 60, 118, 124, 127, 128, 250)]
WAYS = [
    {},
    {"temperature": 0.7, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.0},
    {"top_k": 20},
    {"repetition_penalty": 1.2},
    {"top_logprobs": 2},
]
ENDS = [
    {"max_new_tokens": 1},
    {"max_new_tokens": 12},
    {"max_new_tokens": 20, "stop_token_ids": tuple(range(8))},
    {"max_new_tokens": 20, "stop": ("a", "Bc")},
    {"max_new_tokens": 40, "stop_token_ids": (3,)},
]

pytestmark = pytest.mark.usefixtures("plain_kernels")  # whose pages lie by token


def engine_of(model=MODEL, *, ahead=True, capture=None, pages=64, max_batch=64, **sizes):
    engine = paged_engine(model, pages, max_batch=max_batch, **sizes)
    if ahead:
        engine.lookahead = Lookahead(model, engine.cache, max_batch, capture)
    return engine


class Logged(DecodeStep):
    """A step that logs what the host does: load, run, and wait for the results."""

    def __init__(self, engine, log):
        super().__init__(engine.model, engine.cache, engine.scheduler.max_batch, None)
        self.log = log

    def load(self, tokens, *rows):
        self.log.append("load")
        super().load(tokens, *rows)

    def run(self, live, longest, sampling):
        self.log.append("run")
        return LoggedCopy(super().run(live, longest, sampling), self.log)


class LoggedCopy:
    def __init__(self, copy, log):
        self.copy, self.log = copy, log

    def wait(self):
        self.log.append("wait")
        return self.copy.wait()


def logged_engine(**sizes):
    engine, log = engine_of(**sizes), []
    engine.lookahead._step = Logged(engine, log)
    return engine, log


def state(engine):
    """Hash everything that an engine keeps of its sequences and of its cache, the keys and values
    of filled places too."""
    cache, scheduler = engine.cache, engine.scheduler
    sequences = [
        (s.arrival, s.tokens, s.logprobs, s.weight_versions, s.top, s.page_table, s.num_cached)
        for s in scheduler.running + scheduler.waiting
    ]
    books = cache.ref_count, cache._tokens, cache._filled, cache._reserved, cache._last_used
    indexes = [{k: sorted(v) for k, v in i.items() if v} for i in (cache._following, cache._full)]
    told = len(scheduler.running), sequences, indexes, sorted(cache._free), engine.stats()
    digest = hashlib.blake2b(repr(told).encode())
    for book in books:
        digest.update(book.tobytes())
    for page, filled in enumerate(cache._filled):
        for layer in (*cache.keys, *cache.values):
            digest.update(layer[page, :, :filled].numpy().tobytes())
    return digest.hexdigest()


@cache
def weights_of(version):
    return exact_model("qwen3", version, **SHAPE).named_weights()


class Life:
    """A random life of an engine, told step by step."""

    def __init__(self, seed, **lookahead):
        self.rng, self.model = np.random.default_rng(seed), exact_model("qwen3", **SHAPE)
        sizes = {"pages": int(self.rng.integers(3, 9)), "max_batch": int(self.rng.integers(1, 9))}
        chunk = int(self.rng.choice([50, 300, 2048]))
        self.engine = engine_of(self.model, chunk_tokens=chunk, **sizes, **lookahead)
        self.way = (*WAYS, None, None)[seed % 8]  # None: of all kinds
        self.asked, self.told = [], []

    def play(self):
        acts = (self.ask, self.ask, self.go, self.go, self.go, self.cancel, self.update)
        for _ in range(20):
            acts[self.rng.integers(len(acts))]()
        while self.engine.has_work:
            self.step()
        self.told += [facts(s.completion) for s in self.asked]
        return self.told

    def step(self):
        self.told.append(([s.arrival for s in self.engine.step()], state(self.engine)))

    def go(self):
        for _ in range(self.rng.integers(1, 12)):
            self.step()

    def ask(self):
        rng = self.rng
        prompt, way, end = (part[rng.integers(len(part))] for part in (PROMPTS, WAYS, ENDS))
        params = SamplingParams(**end, **(way if self.way is None else self.way))
        pauses, draws, key = rng.choice([0, 0, 9]), int(rng.integers(5)), address(len(self.asked))
        more = {"num_sampled": draws, "max_tokens_now": int(pauses)}
        for number in range(rng.integers(1, 4)):
            if len(prompt) + params.max_new_tokens <= self.engine.longest:
                asked = Request(key=key + number, prompt=prompt, params=params, **more)
                self.asked.append(self.engine.submit(asked))

    def cancel(self):
        if self.asked:
            self.engine.cancel(self.asked[self.rng.integers(len(self.asked))])

    def update(self):
        version = self.engine.weight_version + 1
        self.engine.apply(version, lambda: self.model.load_weights(weights_of(version)))


@cache
def plain_life(seed):
    life = Life(seed, ahead=False)
    life.play()
    return life


@pytest.mark.parametrize("seed", range(10))
def test_a_random_life_is_the_same_with_steps_ahead(seed):
    capture = as_it_is if seed % 2 else None
    told = Life(seed, capture=capture).play()
    for number, (expected, found) in enumerate(zip(plain_life(seed).told, told, strict=True)):
        assert found == expected, number


def test_random_lives_hold_what_they_are_to_compare():
    seen = Counter()
    for seed in range(10):
        life = plain_life(seed)
        seen.update(s.completion.stop_reason for s in life.asked)
        seen["preemptions"] += life.engine.scheduler.preemptions
        seen["shared"] += life.engine.scheduler.prompt_tokens_cached
        seen["updates"] += life.engine.weight_version
    assert all(seen[r] for r in ("stop", "length", "paused", "cancelled")), seen
    assert all(seen[r] for r in ("preemptions", "shared", "updates")), seen


def test_the_next_step_runs_before_the_host_waits_for_this_one():
    engine, log = logged_engine()
    engine.generate([request(n, [n, 5], max_new_tokens=6) for n in range(3)])
    # the pass of the prompts samples the first token and starts the step of the second
    assert log == ["load", "run", *["run", "wait"] * 4, "wait"]


def test_a_step_is_loaded_again_for_an_end_or_a_newcomer_only():
    engine, log = logged_engine(max_batch=3)
    lengths = [10, 30, 60, 40]  # the last joins when the first has ended
    engine.generate([request(n, [n, 5], max_new_tokens=m) for n, m in enumerate(lengths)])
    assert log.count("run") == 59 and log.count("load") == 5
    log.clear()
    # both get a page at once, the second, which has more of them, in the first row
    prompts = [random_tokens(np.random.default_rng(n), n) for n in (124, 252)]
    engine.generate([request(n, prompt, max_new_tokens=9) for n, prompt in enumerate(prompts)])
    assert log.count("run") == 8 and log.count("load") == 1


def test_a_newcomer_is_planned_alone(monkeypatch):
    made = []

    def counted(kind):
        class Counted(kind):
            def __init__(self, rows, *others):
                made.extend([(kind, len(rows))] if rows else ())
                super().__init__(rows, *others)

        return Counted

    for module, kind in ((scheduler, Work), (lookahead, DecodeInputs)):
        monkeypatch.setattr(module, kind.__name__, counted(kind))
    engine = engine_of(max_batch=3)
    asked = [request(n, [n, 5], max_new_tokens=10 + 7 * n) for n in range(4)]
    asked.append(request(4, max_new_tokens=40, stop_token_ids=tuple(range(200))))
    assert len(engine.generate(asked)[4].tokens) == 1
    assert made == [(kind, count) for count in (3, 1, 1) for kind in (Work, DecodeInputs)]


def test_a_token_behind_a_stop_reaches_nobody():
    [free] = engine_of(ahead=False).generate([request(max_new_tokens=20)])
    stop = int(free.tokens[11])
    first = free.tokens.tolist().index(stop)
    engine, log = logged_engine()
    sequence = engine.submit(request(max_new_tokens=20, stop_token_ids=(stop,)))
    other = engine.submit(request(1, max_new_tokens=20))
    while sequence.completion is None:
        returned = engine.step()
    assert log.count("run") == first + 1  # one more than the tokens that come after a first
    assert engine.lookahead._rows.sequences[0] is sequence and returned == [sequence, other]
    assert sequence.completion.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert engine.step() == [other] and len(sequence.tokens) == first + 1


def test_a_page_is_foreseen_and_a_guess_that_fails_is_run_again():
    asked = [request(n, PROMPTS[4][: 126 - n], max_new_tokens=9) for n in range(2)]
    engine, log = logged_engine()
    running = [engine.submit(one) for one in asked]
    while engine.has_work:
        if len(running[0].tokens) == 3 and "wait" in log:
            page = engine.lookahead._rows.table[0, -1]
            assert page not in running[0].page_table  # free, until the next schedule gives it out
            assert engine.cache.allocate(b"another") == page  # something else takes it
            for side in (*engine.cache.keys, *engine.cache.values):
                side[page] = 7.0
            log.clear()
        engine.step()
    expected = engine_of(ahead=False).generate(asked)
    assert [facts(s.completion) for s in running] == [facts(c) for c in expected]
    assert engine.cache.ref_count.sum() == 1  # the page taken


@pytest.mark.parametrize("live", [1, 3, 5, 9])
def test_padding_rows_touch_no_page(live):
    cache = PageCache(MODEL, 40 * PAGE_BYTES)
    for side in (*cache.keys, *cache.values):
        side.normal_(generator=torch.Generator().manual_seed(live))
    before = [side.clone() for side in (*cache.keys, *cache.values)]
    step = DecodeStep(MODEL, cache, 16, None)
    step.tables.fill_(39)  # what earlier rows left behind
    rng = np.random.default_rng(live)
    tables = rng.permutation(39)[: 2 * live].reshape(live, 2)
    runs = Runs(tables.tolist(), rng.integers(0, 256, live), np.ones(live, np.int64))
    with torch.no_grad():
        step.load(torch.arange(live), runs, np.arange(live), np.arange(live))
        step.run(live, int(runs.positions.max()) + 1, SamplingParams(max_new_tokens=1))
    for side, old in zip((*cache.keys, *cache.values), before, strict=True):
        changed = torch.nonzero((side != old).any(-1).any(1)).tolist()
        assert changed == sorted(map(list, zip(runs.pages, runs.offsets, strict=True)))
    padded = slice(live, padded_batch(live))
    assert not step.positions[padded].any() and not step.draws[padded].any()
    assert step.positions[:live].tolist() == (runs.positions + 1).tolist()


def test_a_step_runs_once_then_is_captured_then_replayed():
    log = []

    def new_capture():
        log.append("pool")
        return capture

    def capture(step):
        log.append("capture")
        return step

    graphs = StepGraphs(new_capture)
    for name in ("a1", "a2", "a3", "b1"):
        graphs.run(name[0], partial(log.append, name))
    # the third runs what was captured at the second
    assert log == ["pool", "a1", "capture", "a2", "a2", "b1"]
    graphs.clear()
    graphs.run("a", partial(log.append, "new"))
    assert log[6:] == ["pool", "new"]


def test_graphs_of_old_weights_are_not_replayed():
    """These kernels make packs at new places; tests/gpu has those that stay."""
    model = exact_model("qwen3", **SHAPE)
    engine = engine_of(model, capture=as_it_is)
    engine.generate([request(max_new_tokens=6)])
    steps = engine.lookahead._step.graphs
    [old] = steps._steps.values()
    assert old is not None
    engine.apply(1, lambda: model.load_weights(weights_of(1)))
    assert not engine.lookahead._rows
    engine.generate([request(max_new_tokens=6)])
    assert old not in steps._steps.values()


def test_graphs_give_their_memory_back_with_the_cache():
    engine = engine_of(capture=as_it_is)
    [expected] = engine.generate([request(max_new_tokens=6)])
    assert engine.lookahead._step.graphs._steps
    engine.rest()
    assert not engine.lookahead._step.graphs._steps and engine.cache.keys == ()
    [found] = engine.generate([request(max_new_tokens=6)])
    assert facts(found) == facts(expected)


def same_with_steps_ahead(asked, **sizes):
    """Return the completions, which are those without steps ahead."""
    expected, found = (engine_of(ahead=ahead, **sizes).generate(asked) for ahead in (False, True))
    assert [facts(completion) for completion in found] == [facts(c) for c in expected]
    return found


def test_page_that_is_freed_and_taken_again_at_once_is_a_new_one():
    """The third sequence fills a page that is cached already, so it gives its own up; the same page
    comes back as its second."""
    assert len(PROMPTS[4]) == 127
    asked = [request(n, PROMPTS[4], max_new_tokens=8, temperature=0.0) for n in range(3)]
    same_with_steps_ahead(asked, pages=3, max_batch=1)


def test_masked_sequences_take_plain_steps_beside_others():
    ends = {"max_new_tokens": 20, "stop_token_ids": tuple(range(48))}
    found = same_with_steps_ahead(
        [request(n, (7, n), min_tokens=6 * (n % 2), **ends) for n in range(6)]
    )
    assert [len(c.tokens) > 6 for c in found[1::2]] == [True] * 3


def test_a_newcomer_sampled_in_another_way_takes_plain_steps_beside_others():
    asked = [request(n, max_new_tokens=20 - 8 * n, temperature=0.1 + n // 2) for n in range(3)]
    same_with_steps_ahead(asked, max_batch=2)
