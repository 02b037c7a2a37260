"""Tensor parallelism: one optimizer step is that of one process but for the order of sums, and a
whole model that sums in as many parts has the log-probs of the divided one, to the last bit."""

import numpy as np
import pytest
import torch

from tandem.model.load import make_exact
from tandem.model.lora import Lora
from tandem.model.probe import probe
from tandem.model.schedule import random_model
from tandem.train.parallel.ranks import ParallelRanks
from tandem.train.ranks import ALONE
from tests.support.meshes import on_mesh
from tests.support.parity import engine_for, largest_gap, random_requests
from tests.support.tiny import stock_model, tiny_config
from tests.support.updates import copied, learner_of, microbatches, require_same_change, updated

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 12}
KINDS = {
    "qwen3": {},
    "llama": {"attention_bias": True, "mlp_bias": True},  # biases behind the sums, too
    "qwen2": {},
    "qwen3_moe": {"num_experts": 8},
}
LORA = Lora(rank=4, alpha=8.0, targets=("all-linear",), seed=3)


def whole_model(kind, dtype=torch.float32, lora=None, seed=0):
    """A model of eight query heads whose biases are not zero."""
    stock = stock_model(tiny_config(kind, **HEADS, **KINDS[kind]), seed=seed)
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in stock.named_parameters():
        if name.endswith("bias"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=noise) * 0.1)
    model = make_exact(stock, lora)
    for name, parameter in model.module.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=noise) * 0.1)
        parameter.data = parameter.data.to(dtype)
    return model


def unpopular(model):
    """Let tokens choose among the first four of eight experts only. Scores of the chosen ones that
    are made to sum to 1 would leave the router's other rows a gradient of rounding errors alone."""
    for layer in model.module.model.layers:
        layer.mlp.gate.norm_topk_prob = False
        one, other, *_ = layer.mlp.gate.weight.data
        layer.mlp.gate.weight.data = torch.stack([one, -one, other, -other, *[one * 0] * 4])
    return model


def published(model, ranks, whole):
    ranks.publish(model, whole if ranks.rank == 0 else None)
    return whole.named_weights() if ranks.rank == 0 else None


def step_on(mesh, kind, lora=None, change=None, checkpointing=False):
    model, ranks = whole_model(kind, lora=lora), ParallelRanks(mesh)
    if change is not None:
        change(model)
    model.checkpointing = checkpointing
    ranks.divide(model, torch.float32)
    rows = updated(learner_of(model, ranks), microbatches(ranks.shares))
    return rows, published(model, ranks, whole_model(kind, lora=lora, seed=1))


def step_alone(kind, shares, lora=None, change=None):
    model = whole_model(kind, lora=lora)
    if change is not None:
        change(model)
    before = copied(model)
    rows = updated(learner_of(model, ALONE), microbatches(shares))
    return rows, model.named_weights(), before


def require_close(found, expected):
    (rows, weights), (others, expected, before) = found, expected
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        assert all(row[name] == pytest.approx(other[name], rel=2e-5) for name in row)
    require_same_change(weights, expected, before)


def steps_on(mesh, cases):
    return [step_on(mesh, *case) for case in cases]


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"tensor": 4}, {"data": 2, "tensor": 2}])
def test_a_step_is_that_of_one_process_but_for_the_order_of_sums(sizes):
    cases = [*((kind, None) for kind in KINDS), ("qwen2", LORA)]
    by_rank = on_mesh(steps_on, cases, **sizes)
    for case, (first, *others) in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert all(rows == first[0] for rows, _ in others)
        require_close(first, step_alone(case[0], sizes.get("data", 1), case[1]))


def test_a_process_whose_experts_no_token_chose_comes_to_all_collectives():
    found = on_mesh(step_on, "qwen3_moe", None, unpopular, data=2, tensor=2)[0]
    require_close(found, step_alone("qwen3_moe", 2, None, unpopular))


def gaps_on(mesh, cases):
    dtypes = torch.float32, torch.bfloat16
    return [gaps_of(mesh, kind, dtype, lora) for kind, lora in cases for dtype in dtypes]


def gaps_of(mesh, kind, dtype, lora):
    """The largest gap between rank 0's engine, over a whole model, and the divided model, before
    and after an update; with the split, and without."""
    size = mesh.config.tensor
    model, ranks = whole_model(kind, lora=lora), ParallelRanks(mesh)
    ranks.divide(model, dtype)
    learner, whole = learner_of(model, ranks), whole_model(kind, dtype, lora)
    requests = random_requests(np.random.default_rng(2), prompts=3, longest=60, group=2)
    gaps = []
    for splits in (size, size, 1):
        if len(gaps) == 1:
            updated(learner, microbatches(ranks.shares), steps=1)
            published(model, ranks, whole)
        whole.split(splits)
        completions = engine_for(whole).generate(requests) if mesh.rank == 0 else None
        completions = mesh.world.gather(completions, "completions")[0]
        with torch.no_grad():
            gaps.append(largest_gap(model, requests, completions, 300, gradients=False))
    return gaps


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        ({"tensor": 2}, [("qwen3", None), ("qwen2", LORA)]),
        ({"tensor": 4}, [("llama", None), ("qwen3_moe", None)]),
        ({"data": 2, "tensor": 2}, [("qwen3_moe", None)]),
    ],
)
def test_an_engine_that_sums_in_as_many_parts_has_the_trainers_bits(sizes, cases):
    for before, after, without in on_mesh(gaps_on, cases, **sizes)[0]:
        assert before == after == 0.0 < without


def test_the_probe_of_a_model_that_sums_in_parts_tries_those_sums():
    model = whole_model("qwen3_moe")
    model.split(4)
    assert random_model(model, 0).splits == 4
    assert probe(model).parity == []
