"""The probe: yes where a prepared process is exact, no where something is not, whatever it is."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tandem.model.forward import batch_logprobs
from tandem.model.kernels import Kernels, in_use
from tandem.model.linear import ExactLinear
from tandem.model.load import make_exact
from tandem.model.probe import (
    SHARERS,
    _attention_differs,
    _gradients_differ,
    _rowwise_differ,
    fastest_exact,
    probe,
    try_matmuls,
)
from tandem.model.schedule import Schedule, random_model, threads_of
from tandem.trainer.pack import pack
from tandem.types import SamplingDistribution
from tests.support.architectures import architecture
from tests.support.parity import CONFIGS
from tests.support.parity import random_model as model_of
from tests.support.tiny import random_samples


def gradients(name, threads):
    """Train a model on packed samples with so many threads."""
    model = model_of(name)
    with threads_of(threads):
        for batch in pack(random_samples(np.random.default_rng(5), 6), 60, shares=1):
            logprobs, _ = batch_logprobs(model, batch, SamplingDistribution())
            logprobs.sum().backward()
    return [p.grad for p in model.trainable().values()]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_finds_nothing_where_engine_and_trainer_agree(name, seed):
    """Small products of a mixture of experts depend on the thread count on some processors: seen on
    an AMD EPYC of family 26. Where the probe finds nothing, training finds nothing either."""
    found = probe(model_of(name), seed)
    assert found.parity == []
    assert found.thread_dependent == [] or name == "qwen3_moe"
    if not found.thread_dependent:
        assert all(map(torch.equal, gradients(name, 1), gradients(name, 2)))


class Odd(ExactLinear):
    """Another last bit where the rows are of a certain number, as another kernel would give."""

    rows = 0

    def forward(self, x):
        out = super().forward(x)
        return torch.nextafter(out, out + 1) if len(x) == self.rows else out


@pytest.mark.parametrize("rows", [4, 32])
def test_linear_with_row_dependent_kernel_is_named(rows):
    model = model_of("qwen3")
    odd = Odd(nn.Parameter(torch.randn(97, 96)))
    odd.rows, model.head = rows, odd
    assert probe(model).parity == [f"linear 96 -> 97: {rows} rows"]


def by_sums_in_blocks_of(block, table, uniform):
    """Tokens of uniforms by the running sum that adds up blocks from the first one on."""
    ends, total = [], torch.zeros(len(table), 1)
    for part in table.exp().split(block, 1):
        ends.append(total + part.cumsum(-1))
        total = ends[-1][:, -1:]
    place = torch.searchsorted(torch.cat(ends, 1), uniform[:, None] * total, right=True)
    return place[:, 0].clamp(max=table.shape[1] - 1)


class ByThreads(Kernels):
    def weight_gradient(self, above, x, total=None):
        found = super().weight_gradient(above, x, total)
        many = len(x) > 8000 and torch.get_num_threads() > 1
        return torch.nextafter(found, found + 1) if many else found


def test_a_gradient_that_threads_change_in_long_sums_only_is_named(monkeypatch):
    model, noise = model_of("qwen3"), torch.Generator().manual_seed(0)
    monkeypatch.setitem(in_use, "cpu", ByThreads())
    assert not _gradients_differ(model, noise, [1, 2], 1000)
    found = _gradients_differ(model, noise, [1, 2], 4096)
    assert all(name in " ".join(found) for name in ("linear 96 -> 97", "linear 96 -> 96")), found


class OtherSums(Kernels):
    """Sums of another order for some rows: their last bits alone differ, which the probe's uniforms
    make visible."""

    def inverse_cdf(self, table, uniform):
        return by_sums_in_blocks_of(128 if len(table) in (3, 20) else 4096, table, uniform)


class OtherSets(Kernels):
    """A top-p that keeps another set for some rows."""

    def top_p_edge(self, logprobs, top_p):
        return super().top_p_edge(logprobs, top_p - 1e-4 * (len(logprobs) == 8))


@pytest.mark.parametrize(
    ("odd", "finding"), [(OtherSums, "sampling: 3 20 rows"), (OtherSets, "top-p: 8 rows")]
)
def test_sampling_that_depends_on_the_rows_is_named(odd, finding, monkeypatch):
    model, noise = model_of("qwen3"), torch.Generator().manual_seed(0)
    model.config.vocab_size = 20_000
    monkeypatch.setitem(in_use, "cpu", odd())
    assert _rowwise_differ(model, noise) == [finding]


def test_random_model_has_every_kind_of_layer_and_its_shapes():
    config = architecture("qwen2")
    config.use_sliding_window, config.sliding_window, config.max_window_layers = True, 40, 1
    config.layer_types = ["full_attention", "sliding_attention", "sliding_attention"]
    model = make_exact(AutoModelForCausalLM.from_config(config))
    small = random_model(model, seed=3)
    own, whole = (one.module.model.layers for one in (small, model))
    assert small.heads == model.heads and [layer.window for layer in own] == [None, 40]
    assert own[0].mlp.down_proj.weight.shape == whole[0].mlp.down_proj.weight.shape
    assert all(weight.std() > 0.005 for weight in small.module.parameters() if weight.numel() > 1)


def with_odd_plans(is_odd):
    """A random model whose attention over pages rounds otherwise where is_odd(runs)."""
    model = random_model(model_of("llama"), seed=0)
    plan = model.paged_plan

    def odd(keys, values, runs):
        made = plan(keys, values, runs)
        if not is_odd(runs):
            return made
        return SimpleNamespace(
            attend=lambda *args: torch.nextafter(out := made.attend(*args), out + 1)
        )

    model.paged_plan = odd
    return model


def test_a_schedule_shows_an_attention_that_depends_on_the_chunks():
    schedule = Schedule(with_odd_plans(lambda runs: (runs.counts == 1).any()), 0)
    assert not torch.equal(schedule.paged((1,)), schedule.packed()[0])


def test_decode_from_shared_pages_that_rounds_otherwise_is_named():
    model = with_odd_plans(lambda runs: len({*runs.table[:, 0].tolist()}) < len(runs.table))
    found = _attention_differs(model, torch.Generator().manual_seed(0))
    batches = " ".join(map(str, SHARERS))
    assert found == [f"attention decode from shared pages: {batches} rows"]


TIMES = {"own": 9.0, "slower": 8.8, "fast": 7.0, "inexact": 1.0, "wrong": 1.0, "broken": 1.0}


class Candidates(Kernels):
    """Kernels made by hand, with their TIMES."""

    matmuls, chosen = tuple(TIMES), ""

    def use_matmul(self, kernel):
        self.chosen = kernel

    def time_ms(self, work):
        return TIMES[self.chosen]

    def matmul(self, x, packed, bias=None):
        if self.chosen == "broken":
            raise RuntimeError("no kernel image is available\nfor this device")
        out = super().matmul(x, packed, bias)
        other = self.chosen == "fast" or (self.chosen == "inexact" and len(x) == 4)
        return 2 * out if self.chosen == "wrong" else out.nextafter(out + 1) if other else out


def test_the_fastest_exact_kernel_is_chosen(monkeypatch):
    candidates = Candidates()
    monkeypatch.setitem(in_use, "cpu", candidates)
    trials = try_matmuls(model_of("qwen3"))
    assert fastest_exact(trials) == "fast" and candidates.chosen == "own"
    assert fastest_exact(trials[:2]) == "own"
    assert [trial.findings for trial in trials[:3]] == [[], [], []]
    assert all("4 rows" in finding for finding in trials[3].findings) and trials[3].findings
    assert [trial.findings for trial in trials[4:]] == [
        ["is far from own"],
        ["RuntimeError: no kernel image is available"],
    ]
    assert str(trials[0]) == "own (9 ms)"
    assert str(trials[5]) == "broken (RuntimeError: no kernel image is available)"
