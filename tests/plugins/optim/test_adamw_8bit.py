"""Moments of 8 bits: the levels and their error, updates beside those of float32 moments, and the
same bits after a reload, for any threads and for processes that hold some rows each."""

from functools import partial

import pytest
import torch
from torch import nn

from tandem.plugins.optim.adamw_8bit import (
    BLOCK,
    Optimizer8bit,
    dequantize,
    dynamic_levels,
    quantize,
)
from tests.support.optimizers import bits, check_reload, optimizer, random_parameters, set_gradients

SHAPES = {"embedding": (40, 300), "experts": (3, 5, 7), "wide": (2, 513), "norm": (300,)}


parameters = partial(random_parameters, SHAPES)


@pytest.mark.parametrize(("signed", "worst"), [(True, 0.0075), (False, 0.004)])
def test_a_number_goes_to_a_level_beside_it(signed, worst):
    """Over eight powers of ten; and as far off as half the spacing of levels, and 1 / 1024."""
    noise = torch.Generator().manual_seed(0)
    powers = 10 ** (-8 * torch.rand(64, 700, generator=noise))
    values = torch.randn(64, 700, generator=noise) * powers
    values = values if signed else values.abs()
    codes, scales = quantize(values, signed=signed)
    found = dequantize(codes, scales, signed=signed)
    assert codes.dtype == torch.uint8 and scales.shape == (64, 3)
    largest = scales.repeat_interleave(BLOCK, 1)[:, :700]
    assert torch.equal(largest[:, :BLOCK].amax(1), values[:, :BLOCK].abs().amax(1))
    levels = torch.tensor(dynamic_levels(signed=signed))
    nearest = (values / largest)[..., None].sub(levels).abs().amin(2) * largest
    error = (found - values).abs()
    assert (error <= nearest + values.abs() / 1024).all()
    assert 0.9 * worst < (error / largest).max() < worst
    small = values.abs() < 1e-3 * largest
    assert small.float().mean() > 0.1 and (error / largest)[small].max() < 1e-4


def test_levels_are_the_256_of_the_paper_and_zero_stays_zero():
    for signed, least in ((True, 5.5e-7), (False, 3.25e-7)):
        levels = dynamic_levels(signed=signed)
        assert len({*levels}) == 256 and levels == sorted(levels)
        assert min(level for level in levels if level > 0) == pytest.approx(least)
        assert levels[-1] == 1.0 and levels[0] == pytest.approx(-0.99296875 if signed else 0)
        zeros = torch.zeros(2, 300)
        zeros[1, :BLOCK] = 1e30  # a neighbour in another block changes nothing
        assert torch.equal(dequantize(*quantize(zeros, signed=signed), signed=signed), zeros)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_near_to_those_of_float32_moments(dtype):
    """The path of 30 updates ends within 2% of its length; a vector takes the very same one."""
    weights, twin, first = parameters(dtype), parameters(dtype), parameters(dtype)
    ours, theirs = optimizer(weights, Optimizer8bit), optimizer(twin)
    for step in range(30):
        set_gradients(step, weights, twin)
        assert ours.update() == theirs.update()
    assert bits({"norm": weights["norm"]}) == bits({"norm": twin["norm"]})
    for name in ("embedding", "experts", "wide"):
        found, expected = ours.weights()[name], theirs.weights()[name]
        path = (expected - first[name].detach().float()).norm()
        assert 0 < (found - expected).norm() < 0.02 * path, name


def test_a_small_gradient_that_ends_beside_large_ones_makes_no_large_step():
    """A second moment that is rounded to zero would divide the first one by 1e-8."""
    weights = {"w": nn.Parameter(torch.zeros(1, BLOCK))}
    ours = optimizer(weights, Optimizer8bit, learning_rate=1.0, weight_decay=0.0)
    sizes = torch.logspace(0, -7, BLOCK)[None]
    for step in range(4):
        before = weights["w"].detach().clone()
        weights["w"].grad = sizes if step < 3 else torch.where(sizes > 1e-2, sizes, 0.0)
        ours.update()
    assert (weights["w"].detach() - before).abs().max() < 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reloaded_state_continues_with_the_same_bits(dtype):
    check_reload(lambda: parameters(dtype), Optimizer8bit)


def test_one_and_two_threads_and_any_rows_of_a_matrix_take_the_same_steps():
    noise, before, found = torch.Generator().manual_seed(0), torch.get_num_threads(), []
    whole = torch.randn(301, 777, generator=noise)
    gradients = [torch.randn(301, 777, generator=noise) for _ in range(3)]
    for threads, rows in ((1, [301]), (2, [301]), (1, [100, 1, 200])):
        torch.set_num_threads(threads)
        parts = {str(n): nn.Parameter(part) for n, part in enumerate(whole.clone().split(rows))}
        ours = optimizer(parts, Optimizer8bit)
        for gradient in gradients:
            for part, slope in zip(parts.values(), gradient.split(rows), strict=True):
                part.grad = slope.clone()
            ours.update()
        found.append(torch.cat([part.detach() for part in parts.values()]))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
