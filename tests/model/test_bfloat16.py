"""bfloat16 on a CPU: rows keep their bits in any company, and numbers are close to float32's."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tandem.model.kernels import CPU
from tandem.model.layers import embed
from tandem.model.linear import Part, fused_linear
from tandem.model.load import make_exact
from tandem.model.onednn import TILE_ROWS, gradient_product
from tandem.model.placement import Placement
from tandem.model.probe import probe
from tests.support import tiny
from tests.support.architectures import architecture, stock, why_inexact
from tests.support.parity import gap_of
from tests.support.tiny import exact_logits, random_tokens, stock_logits

BF16 = torch.bfloat16
noise = partial(tiny.noise, dtype=BF16)


@pytest.mark.parametrize("inputs, outputs", [(96, 288), (576, 576), (700, 96), (1536, 576)])
def test_many_rows_at_once_have_the_bits_of_a_tile(inputs, outputs):
    weight, x = noise(outputs, inputs), noise(2 * 2048 + 5 * TILE_ROWS, inputs)
    packed = CPU.pack(weight)
    tiles = torch.cat([CPU.matmul(part, packed) for part in x.split(TILE_ROWS)])
    for rows in (len(x), 2048, 1024 + 512, 7 * TILE_ROWS):
        assert torch.equal(CPU.matmul(x[:rows], packed), tiles[:rows])


def test_products_are_rounded_once():
    x, weight, bias = noise(40, 96), noise(50, 96, seed=1), noise(50, seed=2)
    expected = F.linear(x.double(), weight.double(), bias.double())
    found = CPU.matmul(x, CPU.pack(weight), bias)
    assert found.dtype == BF16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-3)


def test_gradients_of_a_fused_linear_are_those_of_float32():
    x = noise(37, 48).requires_grad_()
    weights = [noise(24, 48, seed=1).requires_grad_(), noise(16, 48, seed=2).requires_grad_()]
    parts = [Part(weight) for weight in weights]
    above = noise(37, 40, seed=3)
    fused_linear(x, parts, CPU.pack(torch.cat(weights))).backward(above)
    exact = above.float() @ torch.cat(weights).float()
    torch.testing.assert_close(x.grad.float(), exact, rtol=2e-2, atol=5e-2)
    for weight, grad in zip(weights, above.float().split([24, 16], 1), strict=True):
        torch.testing.assert_close(weight.grad.float(), grad.t() @ x.float(), rtol=2e-2, atol=5e-2)


def test_swiglu_and_its_gradient_are_those_of_float32():
    x = noise(9, 26).requires_grad_()
    twin = x.detach().float().requires_grad_()
    above = noise(9, 13, seed=1)
    out, expected = CPU.swiglu(x), CPU.swiglu(twin)
    assert torch.equal(out, expected.to(BF16))
    out.backward(above)
    expected.backward(above.float())
    assert torch.equal(x.grad, twin.grad.to(BF16))


def test_gradient_of_a_frequent_token_is_summed_in_float32():
    weight = torch.zeros(3, 2, dtype=BF16, requires_grad=True)
    weight.grad_dtype = torch.float32
    embed(weight, torch.ones(1000, dtype=torch.int64)).sum().backward()
    assert weight.grad.tolist() == [[0.0, 0.0], [1000.0, 1000.0], [0.0, 0.0]]


def test_gradient_products_have_the_type_of_the_second_factor_or_float32():
    a, b = torch.randn(5, 32), noise(32, 7)
    found = gradient_product(a, b)
    assert found.dtype in (BF16, torch.float32)
    torch.testing.assert_close(found.float(), a @ b.float(), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "gpt_oss", "opt", "deepseek_v3"])
def test_general_path_is_exact_and_as_close_to_float32_as_transformers(name):
    assert not why_inexact(architecture(name), Placement(torch.device("cpu"), BF16))
    model, whole, theirs = make_exact(stock(name).to(BF16)), stock(name), stock(name).to(BF16)
    theirs.set_experts_implementation("eager")
    assert probe(model, 1).parity == []
    assert gap_of(model, prompts=3, longest=150, group=2) == 0.0
    tokens = random_tokens(np.random.default_rng(0), 100)
    with torch.no_grad():
        expected, other = stock_logits(whole, tokens), stock_logits(theirs, tokens)
        [found] = exact_logits(model, [tokens])
    assert (found - expected).abs().median() <= 1.1 * (other - expected).abs().median()
