"""Decoding ahead over Triton's kernels: captured as CUDA graphs where there is a GPU, in the
interpreter elsewhere."""

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("triton", reason="triton is not installed")
from triton.runtime.interpreter import GridExecutor

from tandem.engine.decode import DecodeStep
from tandem.engine.engine import Engine
from tandem.engine.graphs import StepGraphs, cuda_capture
from tandem.engine.page_cache import PageCache
from tandem.engine.sampler import device_uniforms
from tandem.model.load import make_exact
from tandem.model.paged_attention import Runs
from tandem.runtime.rng import uniforms
from tandem.types import SamplingParams
from tests.support.engines import facts, request
from tests.support.kernels import triton_everywhere
from tests.support.operators import Operators
from tests.support.parity import words
from tests.support.tiny import random_tokens, stock_model, tiny_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
# the interpreter takes a second for each ten tokens
LONG = 60 if DEVICE == "cuda" else 4


@pytest.fixture(autouse=True)
def triton_kernels():
    with triton_everywhere(), torch.no_grad():
        yield


def model_of(seed=0):
    config = tiny_config("mistral", **SHAPE, num_hidden_layers=1)
    return make_exact(stock_model(config, seed=seed).to(DEVICE))


def play(model, other, *, ahead):
    """Requests that end at stops and lengths, cross a page, join, are cancelled and get new
    weights; return all that came out."""
    engine = Engine(model, words, cache_bytes=1 << 18, max_batch=3)
    assert engine.lookahead is not None
    if not ahead:
        engine.lookahead = None
    prompts = [random_tokens(np.random.default_rng(n), size) for n, size in enumerate((3, 126, 2))]
    filters = {"temperature": 0.8, "top_p": 0.9, "stop_token_ids": tuple(range(9))}
    asked = [request(n, prompts[n % 3], max_new_tokens=LONG + n, **filters) for n in range(4)]
    running = [
        engine.submit(replace(one, max_tokens_now=3 * (n == 2))) for n, one in enumerate(asked)
    ]
    order = [[s.arrival for s in engine.step()] for _ in range(4)]
    engine.cancel(running[1])
    weights = other.named_weights()
    engine.apply(1, lambda: model.load_weights(weights))
    while engine.has_work:
        order.append([s.arrival for s in engine.step()])
    books = engine.cache._filled.tolist(), engine.cache._tokens.tolist(), engine.cache._free
    return order, [facts(s.completion) for s in running], books


def test_steps_ahead_give_the_bits_of_plain_steps_over_triton():
    plain, ahead = (play(model_of(), model_of(seed=1), ahead=ahead) for ahead in (False, True))
    assert plain == ahead


class Watched(DecodeStep):
    """A step that notes how many rows it had, and of how many each tile."""

    def __init__(self, engine):
        new_capture = partial(cuda_capture, engine.model.device) if DEVICE == "cuda" else None
        super().__init__(engine.model, engine.cache, engine.scheduler.max_batch, new_capture)
        self.seen = []

    def run(self, live, longest, sampling):
        count = self.tiles[1][self.tiles[1] > 0].tolist() if self.sharing else []
        self.seen.append((live, count))
        return super().run(live, longest, sampling)


def play_groups(model, *, ahead):
    """Groups of 4, 2 and later 3 samples, which end one after the other, and a sample of its own;
    return what came out and the tiles of each step."""
    engine = Engine(model, words, cache_bytes=1 << 19, max_batch=8)
    engine.lookahead._step = step = Watched(engine)
    if not ahead:
        engine.lookahead = None
    prompts = [
        random_tokens(np.random.default_rng(n), size) for n, size in enumerate((130, 131, 140, 9))
    ]

    def submit(group, *lengths):
        return [
            engine.submit(request(10 * group + n, prompts[group], max_new_tokens=length))
            for n, length in enumerate(lengths)
        ]

    running = submit(0, 12, 3, 4, 12) + submit(1, 12, 5) + submit(3, 4)
    for _ in range(5):
        engine.step()
    running += submit(2, 5, 3, 4)
    while engine.has_work:
        engine.step()
    return [facts(s.completion) for s in running], step.seen


def test_steps_ahead_read_what_samples_share_once_with_the_bits_of_plain_steps():
    model = model_of()
    (plain, _), (ahead, seen) = (play_groups(model, ahead=ahead) for ahead in (False, True))
    assert plain == ahead
    tiles = [count for _, count in seen]
    # two groups that shrink as samples end, a third that joins, and at last one sample alone
    assert all(count in tiles for count in ([4, 2], [3, 2], [2], [2, 3])), seen
    assert tiles[-1] == []


@pytest.mark.parametrize("live", [1, 3])
def test_padding_rows_touch_no_page_over_triton(live):
    model = model_of()
    cache = PageCache(model, 1 << 18)
    before = [(layer, layer.normal_().clone()) for layer in (*cache.keys, *cache.values)]
    step = DecodeStep(model, cache, 4, None)
    step.tables.fill_(1)  # what earlier rows left behind
    runs = Runs(
        [[5 - n, 6 + n] for n in range(live)], np.array([130, 7, 255])[:live], np.ones(live, int)
    )
    step.load(torch.arange(live, device=DEVICE), runs, np.arange(live), np.arange(live))
    step.run(live, 256, SamplingParams(max_new_tokens=1))
    for layer, old in before:
        changed = torch.nonzero((layer != old).any(-1).any(1)).tolist()
        assert changed == sorted(map(list, zip(runs.pages, runs.offsets, strict=True)))


def test_uniforms_of_the_device_are_those_of_the_host():
    keys = np.random.default_rng(0).integers(0, 2**64, 1000, np.uint64)
    columns = (keys.view(np.int64), np.arange(1000))
    found = device_uniforms(*(torch.from_numpy(column).to(DEVICE) for column in columns))
    assert found.cpu().numpy().tobytes() == uniforms(keys, columns[1]).tobytes()


@pytest.mark.skipif(DEVICE == "cpu", reason="a graph is captured on a GPU only")
def test_steps_were_captured_on_the_gpu():
    engine = Engine(model_of(), words, cache_bytes=1 << 18, max_batch=3)
    engine.generate([request(n, max_new_tokens=20) for n in range(3)])
    assert any(engine.lookahead._step.graphs._steps.values())


@pytest.mark.skipif(DEVICE == "cuda", reason="launches are counted in the interpreter")
@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_a_layer_of_a_decode_step_is_eight_launches(kind, monkeypatch):
    """Triton's kernels are launched, and no operator of torch but those that move nothing."""
    launch, counts = GridExecutor.__call__, Counter()

    def counted(*arguments, **options):
        counts["launch"] += 1
        with _disable_current_modes():
            return launch(*arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    found = []
    for layers in (1, 3):
        config = tiny_config(kind, **SHAPE | {"num_hidden_layers": layers})
        model = make_exact(stock_model(config, seed=0))
        cache = PageCache(model, 1 << 19)
        runs = Runs([[0], [1]], np.array([5, 7]), np.ones(2, int))
        plan = model.paged_plan(cache.keys, cache.values, runs)
        tokens = torch.ones(2).long(), torch.tensor([5, 7])
        model.hidden(*tokens, plan)  # weights are packed
        counts.clear()
        with Operators() as operators:
            model.hidden(*tokens, plan)
        found.append(counts + operators.counts)
    more = found[1] - found[0]
    assert more.pop("launch") == 2 * 8
    free = ("empty", "view", "detach", "split", "slice", "alias")
    assert not [name for name in more if not any(word in name for word in free)], more


class FakeGraph:
    """Reads what a captured step would: the packs where they were, as they are now."""

    def __init__(self, model, step):
        self.model, self.step = model, step
        self.found = [pack.data_ptr() for pack in self.packs()]

    def packs(self):
        return [pack._packed for pack in self.model.packs() if pack._packed is not None]

    def replay(self):
        assert [pack.data_ptr() for pack in self.packs()] == self.found
        before = [pack.clone() for pack in self.packs()]
        self.step()
        assert all(map(torch.equal, before, self.packs()))


def test_captured_steps_outlive_ten_weight_versions():
    """Packs are renewed where they are, so no step is captured again."""
    model, captured, counts = model_of(), [], []
    engine, plain = (Engine(model, words, cache_bytes=1 << 18, max_batch=3) for _ in range(2))
    plain.lookahead = None

    def capture(step):
        captured.append(FakeGraph(model, step))
        return captured[-1].replay

    engine.lookahead._step.graphs = StepGraphs(lambda: capture)
    asked = [request(0, random_tokens(np.random.default_rng(0), 5), max_new_tokens=4)]
    for version in range(1, 11):
        last = engine.generate(asked)
        counts.append(len(captured))
        if version == 10:
            plain.apply(9)
            assert list(map(facts, last)) == list(map(facts, plain.generate(asked)))
        changed = {name: weight * 1.1 for name, weight in model.named_weights().items()}
        engine.apply(version, partial(model.load_weights, changed))
    assert counts[1:] == [1] * 9
