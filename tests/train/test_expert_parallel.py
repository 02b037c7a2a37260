"""Experts held by several processes compute what one process computes, and learn the same but for
the order of sums."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from tandem.config.parallel import Parallel
from tandem.model.forward import batch_logprobs
from tandem.train.parallel.ranks import ParallelRanks
from tests.support.meshes import on_mesh
from tests.support.tiny import exact_model
from tests.support.updates import (
    SAMPLING,
    Halves,
    copied,
    learner_of,
    microbatches,
    require_same_change,
    updated,
)

CASES = {
    "expert=2": ({"expert": 2}, 4, False),
    "8 experts": ({"expert": 2}, 8, False),
    "data=2 x expert=2": ({"data": 2, "expert": 2}, 4, False),
    "expert=2 x tensor=2": ({"expert": 2, "tensor": 2}, 8, False),
    "expert=2 x tensor=2, without tokens": ({"expert": 2, "tensor": 2}, 8, True),
    "experts without tokens": ({"data": 2, "expert": 2}, 4, True),
}
DTYPES = (torch.float32, torch.bfloat16)


def model_of(experts, only_two, dtype=torch.float32, seed=0):
    """A model. only_two: every token chooses expert 0 or expert 1, and activations are
    recomputed."""
    if not only_two:
        model = exact_model("qwen3_moe", seed, num_experts=experts)
    else:
        changes = {"num_experts_per_tok": 1, "norm_topk_prob": False}
        model = exact_model("qwen3_moe", seed, num_experts=experts, **changes)
        for layer in model.module.model.layers:
            weight = layer.mlp.gate.weight.data
            weight[1], weight[2:] = -weight[0], 0.0
    model.checkpointing = only_two
    for parameter in model.parameters():  # and no buffer
        parameter.data = parameter.data.to(dtype)
    return model


def logprobs(model, ranks):
    return ranks.forward(
        model, microbatches(ranks.shares), lambda b: batch_logprobs(model, b, SAMPLING)[0]
    )


def balanced(model, ranks):
    return replace(learner_of(model, ranks), router_aux_loss_coef=0.1)


def run_on(mesh, *kind):
    forward = {}
    for dtype in reversed(DTYPES):
        model, ranks = model_of(*kind), ParallelRanks(mesh)
        ranks.divide(model, dtype)
        forward[dtype] = logprobs(model, ranks)
    held = len(model.module.model.layers[0].mlp.experts.expert_packs)
    rows = updated(balanced(model, ranks), microbatches(ranks.shares))
    whole = model_of(*kind, seed=1) if mesh.rank == 0 else None
    ranks.publish(model, whole)
    return forward, held, rows, None if whole is None else whole.named_weights()


@cache
def run(case):
    sizes, *kind = CASES[case]
    return on_mesh(run_on, *kind, **sizes)


def alone(case, dtype=torch.float32):
    """A whole model, and a process that accumulates the shares of a case."""
    sizes, *kind = CASES[case]
    model, parallel = model_of(*kind, dtype), Parallel(**sizes)
    model.split(parallel.tensor)
    return model, Halves(parallel.data * parallel.expert)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_forward_bits_with_divided_experts_are_those_of_one_process(case, dtype):
    expected = logprobs(*alone(case, dtype))
    for forward, held, *_ in run(case):
        assert held == (4 if case == "8 experts" else 2)
        assert all(map(np.array_equal, forward[dtype], expected))


@pytest.mark.parametrize("case", CASES)
def test_steps_with_divided_experts_are_close_to_those_of_one_process(case):
    """Products of the rows of all processes have gradients with other last bits."""
    model, ranks = alone(case)
    before = copied(model)
    expected = updated(balanced(model, ranks), microbatches(ranks.shares))
    (*_, rows, weights), *others = run(case)
    assert rows[0]["nll"] == expected[0]["nll"] and all(other[2] == rows for other in others)
    assert (rows[0]["router/unused"] >= 0.5) == CASES[case][2]
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-6)
    require_same_change(weights, model.named_weights(), before)


@pytest.mark.parametrize("other", ["pipeline", "context"])
def test_divided_experts_in_a_stage_or_in_a_part_of_the_rows(other):
    found = on_mesh(plain_run_on, **{other: 2, "expert": 2})
    forward, rows, weights = found[0]
    model, ranks = model_of(4, False), Halves(2)
    assert all(map(np.array_equal, forward, logprobs(model, ranks)))
    before = copied(model)
    expected = updated(learner_of(model, ranks), microbatches(2))
    assert rows[0]["nll"] == expected[0]["nll"]
    assert rows[1]["nll"] == pytest.approx(expected[1]["nll"], rel=1e-6)
    require_same_change(weights, model.named_weights(), before)


def plain_run_on(mesh):
    model, ranks = model_of(4, False), ParallelRanks(mesh)
    ranks.divide(model, torch.float32)
    forward = logprobs(model, ranks)
    rows = updated(learner_of(model, ranks), microbatches(ranks.shares))
    whole = model_of(4, False, seed=1) if mesh.rank == 0 else None
    ranks.publish(model, whole)
    return forward, rows, None if whole is None else whole.named_weights()
