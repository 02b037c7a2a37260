"""Data parallelism: one reduction of gradients an update, and beside offloaded optimizer state."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tandem.model.load import make_exact
from tandem.model.lora import Lora
from tandem.plugins.optim.offload import OffloadedOptimizer
from tandem.runtime.errors import InvariantError
from tandem.train.checks import require_frozen
from tandem.train.pack import pack
from tandem.train.parallel.ranks import ParallelRanks
from tests.support.meshes import on_mesh, peak_bytes
from tests.support.tiny import exact_model, random_samples, stock_model, tiny_config
from tests.support.updates import Halves, learner_of, microbatches, step_alone, step_on, updated

ADAPTER = Lora(rank=2, alpha=4.0, targets=("q_proj", "v_proj"), seed=1)


def offloaded_on(mesh):
    return step_on(mesh, "qwen3", 2, optimizer=partial(OffloadedOptimizer, bucket=20_000))


def test_two_processes_with_offloaded_state_step_to_the_bits_of_one():
    (rows, weights), (others, _) = on_mesh(offloaded_on, data=2)
    alone, expected = step_alone("qwen3", 2)
    assert rows == alone == others
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def reductions_on(mesh, budget):
    """(microbatches of each process, sums of gradients announced in one update)"""
    announced = []

    def announce(what, ranks):
        announced.append(what)
        return nullcontext()

    watched = replace(
        mesh,
        groups={key: replace(group, announce=announce) for key, group in mesh.groups.items()},
        shards=replace(mesh.shards, announce=announce),
        replicas=replace(mesh.replicas, announce=announce),
    )
    model, ranks = exact_model("qwen3"), ParallelRanks(watched)
    ranks.divide(model, torch.float32)
    batches = pack(random_samples(np.random.default_rng(5), 6), budget, shares=2)
    updated(learner_of(model, ranks), batches, steps=1)
    return len(batches) / 2, announced.count("gradients")


def test_accumulation_over_microbatches_sums_gradients_over_processes_once():
    """Once for each of the two layers and for what is outside of them."""
    few, many = (on_mesh(reductions_on, budget, data=2) for budget in (400, 40))
    assert few == [(1, 3)] * 2
    assert many[0][0] >= 3 and [sums for _, sums in many] == [3, 3]


def adapted(dtype):
    """A model whose weights are read in that type, as its file has them, with an adapter."""
    stock = stock_model(tiny_config("qwen3")).to(torch.bfloat16)
    return make_exact(stock.to(dtype), ADAPTER)


def adapted_steps_on(mesh, dtype):
    model, ranks = adapted(dtype), ParallelRanks(mesh)
    ranks.divide(model, dtype)
    return updated(learner_of(model, ranks), microbatches(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_processes_train_an_adapter_as_one(dtype):
    """Masters start from the rounded weights there as here."""
    expected = updated(learner_of(adapted(dtype), Halves(2)), microbatches(2))
    assert on_mesh(adapted_steps_on, dtype, data=2) == [expected, expected]


def shares_memory_on(mesh):
    """Tell whether a reference is taken for the trained policy: one of its own, the policy, and
    the policy without its adapter."""

    def is_refused(policy, reference):
        try:
            require_frozen(reference, learner_of(policy, ranks))
        except InvariantError:
            return True
        return False

    ranks = ParallelRanks(mesh)
    policy, reference = exact_model("qwen3"), exact_model("qwen3", seed=1)
    own_base = adapted(torch.float32)
    for model in (policy, reference, own_base):
        ranks.divide(model, torch.float32)
    return [is_refused(*pair) for pair in ((policy, reference), (policy, policy), (own_base,) * 2)]


def test_a_divided_reference_shares_no_memory_with_the_policy():
    assert on_mesh(shares_memory_on, data=2) == [[False, True, False]] * 2


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}


def peak_on(mesh):
    """(bytes of the bfloat16 weights, most bytes that `divide` has allocated at once)"""
    stock = stock_model(tiny_config("qwen3", **WIDE)).to(torch.bfloat16)
    model, ranks = make_exact(stock), ParallelRanks(mesh)
    size = sum(2 * weight.numel() for weight in model.module.parameters())
    return size, peak_bytes(lambda: ranks.divide(model, torch.bfloat16))


@pytest.mark.parametrize(("sizes", "most"), [({"data": 2}, 1.9), ({"tensor": 2}, 0.6)])
def test_a_model_is_never_whole_in_float32_while_it_is_divided(sizes, most):
    """Twice its size in bfloat16 would be whole. With data the parts are as large as that, and a
    layer of eight a quarter."""
    for size, more in on_mesh(peak_on, **sizes):
        assert more < most * size
