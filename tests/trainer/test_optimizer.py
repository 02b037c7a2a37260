"""AdamW, clipping, schedules and state, against torch's plain AdamW and against itself after a
reload."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from tandem.model.boxes import Box, whole_box
from tandem.model.schedule import threads_of
from tandem.plugins.optim.offload import OffloadedOptimizer
from tandem.trainer.optimizer import Optimizer, dither, factor, global_norm
from tests.support.optimizers import bits, check_reload, optimizer, random_parameters, set_gradients

SHAPES = {"embedding": (30, 8), "bias": (8,), "experts": (3, 5, 8)}


parameters = partial(random_parameters, SHAPES)
bfloat16_parameters = partial(random_parameters, SHAPES, torch.bfloat16)


def in_host_memory(bucket):
    return partial(OffloadedOptimizer, bucket=bucket)


def test_updates_are_torchs_adamw_with_decay_on_matrices_only():
    weights, twin = parameters(), parameters()
    ours = optimizer(weights)
    theirs = torch.optim.AdamW(
        [
            {"params": [twin["embedding"], twin["experts"]], "weight_decay": 0.1},
            {"params": [twin["bias"]], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        fused=False,
        foreach=False,
    )
    for step in range(5):
        set_gradients(step, weights, twin)
        ours.update()
        theirs.step()
        for name, parameter in weights.items():
            # the fused kernel rounds its intermediate results elsewhere: an ulp or two of a weight
            # of order 1
            torch.testing.assert_close(parameter, twin[name], rtol=1e-6, atol=1e-6)


def test_norm_is_of_before_clipping_and_gradient_is_scaled():
    weights, twin = parameters(), parameters()
    clipped, scaled = optimizer(weights, max_grad_norm=0.5), optimizer(twin)
    set_gradients(0, weights, twin, scale=7.0)
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in twin.values()))
    for parameter in twin.values():
        parameter.grad.mul_(0.5 / global_norm([p.grad for p in weights.values()]))
    assert clipped.update()["grad_norm"] == pytest.approx(norm, rel=1e-6) and norm > 0.5
    scaled.update()
    # Adam divides by the gradient's own size, so the moments show the clipping and the weights
    # hardly would
    assert all(torch.equal(clipped.state()[key], scaled.state()[key]) for key in clipped.state())
    assert global_norm([clipped.state()[f"exp_avg.{name}"] for name in SHAPES]) == pytest.approx(
        0.1 * 0.5, rel=1e-5
    )


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [1 / 3, 2 / 3, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
    ],
)
def test_a_schedule_warms_up_and_decays_over_the_rest(schedule, expected):
    factors = [factor(schedule, step, 2, 6) for step in range(7)]
    assert factors == pytest.approx(expected, abs=1e-12)
    assert factor(schedule, 1000, 2, 6) == pytest.approx(expected[-1], abs=1e-12)


def test_the_learning_rate_of_the_schedule_is_the_one_used():
    weights = parameters()
    ours = optimizer(weights, schedule="linear", total_steps=4, weight_decay=0.0)
    rates, moves = [], []
    for _ in range(4):
        before = weights["bias"].detach().clone()
        for parameter in weights.values():
            parameter.grad = torch.ones_like(parameter)
        rates.append(ours.update()["learning_rate"])
        moves.append(float((before - weights["bias"].detach()).mean()))
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    # with equal gradients Adam moves by its learning rate
    assert moves == pytest.approx(rates, rel=1e-3)


@pytest.mark.parametrize("make", [parameters, bfloat16_parameters])
def test_a_reloaded_state_continues_with_the_same_bits(make):
    assert set(check_reload(make, warmup_steps=1)) == {
        f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq", "step") for name in SHAPES
    }


def test_global_norm_has_the_same_bits_for_one_and_two_threads():
    noise = torch.Generator().manual_seed(0)
    shapes = [(700, 300), (3, 70_000), (1, 90_001), (90_001,), (2, 50, 900), (1,), (1, 1)]
    tensors = [torch.randn(shape, generator=noise) for shape in shapes]
    norms = []
    for threads in (1, 2):
        with threads_of(threads):
            norms.append(global_norm(tensors))
    assert norms[0] == norms[1]
    exact = math.sqrt(sum(float(np.square(t.numpy().astype(np.float64)).sum()) for t in tensors))
    assert norms[0] == pytest.approx(exact, rel=1e-6)  # rows are summed in float32


def test_bfloat16_parameters_are_their_masters_rounded():
    """The masters take the steps that float32 parameters with the same gradients take."""
    rounded = bfloat16_parameters()
    ours = optimizer(rounded)
    exact = {name: nn.Parameter(master.clone()) for name, master in ours.weights().items()}
    theirs = optimizer(exact)
    for step in range(3):
        set_gradients(step, rounded, exact)
        assert ours.update() == theirs.update()
    assert bits(ours.weights()) == bits(exact)
    assert all(torch.equal(p, exact[name].bfloat16()) for name, p in rounded.items())
    assert all(tensor.dtype == torch.float32 for tensor in ours.state().values())


@pytest.mark.parametrize("shape", [(90_000,), (300, 300), (9, 100, 100)])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_updates_far_below_the_spacing_of_bfloat16_move_its_weights_in_the_mean(shape, sign):
    """By Adam's learning rate: 1/50 of the spacing of numbers from 2 to 4, less of larger ones."""
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 6 + 2
    weights = {"w": nn.Parameter(numbers.bfloat16())}
    before, rate = weights["w"].detach().float(), 2.0**-6 / 50
    ours = optimizer(weights, learning_rate=rate, weight_decay=0.0)
    for step in range(1, 4):
        weights["w"].grad = torch.full(shape, sign)
        ours.update()
        moved = weights["w"].detach().float() - before
        assert float(moved.mean()) == pytest.approx(-sign * step * rate, rel=0.05)


@pytest.mark.parametrize("shape", [(7,), (40, 50), (3, 9, 11)])
def test_masters_start_beside_their_weights_by_the_place_in_the_whole_tensor(shape):
    """And nearer than half of the spacing, on both sides of powers of two, of zeros not at all."""
    numbers = torch.tensor([0.0, -0.0, 1.0, -2.0, 3.0, -1.0078125, 1e-39]).bfloat16()
    weight = numbers.repeat(-(-math.prod(shape) // 7))[: math.prod(shape)].view(shape)
    master = weight.float() * (1 + 2.0**-10)  # nearest to the weight still
    dither(master, "w", whole_box(shape))
    assert torch.equal(master.bfloat16(), weight)
    assert torch.equal(master != weight.float(), weight != 0)
    box = Box(tuple(n // 3 for n in shape), tuple(n // 2 for n in shape), shape)
    part = weight[box.slices].float()
    dither(part, "w", box)
    assert torch.equal(part, master[box.slices])


def test_gradients_of_bfloat16_parameters_are_summed_in_float32():
    weights = {"w": nn.Parameter(torch.zeros(1, 2, dtype=torch.bfloat16))}
    optimizer(weights)
    for part in (1.0, 2.0**-9):  # whose sum bfloat16 does not have
        (weights["w"] * torch.tensor([[part, 0.0]])).sum().backward()
    assert weights["w"].grad.tolist() == [[1.0 + 2.0**-9, 0.0]]


@pytest.mark.parametrize("make", [parameters, bfloat16_parameters])
@pytest.mark.parametrize("bucket", [1, 250, 10_000])
def test_offloaded_state_gives_the_same_bits(make, bucket):
    weights, twin = make(), make()
    resident, offloaded = optimizer(weights), optimizer(twin, in_host_memory(bucket))
    for step in range(4):
        set_gradients(step, weights, twin)
        if step == 2:  # a parameter without a gradient, and its state, stay as they are
            weights["experts"].grad = twin["experts"].grad = None
        assert resident.update() == offloaded.update()
        assert bits(weights) == bits(twin) and bits(resident.weights()) == bits(offloaded.weights())
    states = resident.state(), offloaded.state()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_state_leaves_the_device_after_an_update_and_comes_bucket_by_bucket():
    weights = bfloat16_parameters()
    ours = optimizer(weights, in_host_memory(250))
    homes = {name: master.data_ptr() for name, master in ours.masters.items()}
    sizes, step = [], ours.adam.step

    def watched():
        [group] = ours.adam.param_groups
        away = [p.data_ptr() not in homes.values() for p in group["params"]]
        sizes.append((len(group["params"]), all(away)))
        step()

    ours.adam.step = watched
    moments = []
    for number in range(2):
        set_gradients(number, weights)
        ours.update()
        assert {name: master.data_ptr() for name, master in ours.masters.items()} == homes
        moments.append({name: tensor.data_ptr() for name, tensor in ours.state().items()})
    # "embedding" and "experts" have 240 and 120 elements, "bias" is of the other group
    assert sizes == 2 * [(1, True), (1, True), (1, True)] and moments[0] == moments[1]


@pytest.mark.parametrize("other", [Optimizer, in_host_memory(250)])
def test_offloaded_state_is_saved_and_loaded_to_the_same_bits(other):
    """A run may go on with the other setting."""
    check_reload(bfloat16_parameters, in_host_memory(250), other)
