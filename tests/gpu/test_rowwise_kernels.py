"""RMSNorm, rotary embedding and SwiGLU: against float64, forward and backward; a row's bits do not
depend on other rows, and gradients have the same bits twice."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed")

from tandem.plugins.triton.rowwise import WEIGHT_PARTS, add_rms_norm, rms_norm, rotate, swiglu
from tests.support.kernels import (
    BF16,
    FP16,
    FP32,
    ON_GPU,
    assert_gradient_near,
    assert_near,
    gradients,
    random,
    same_bits,
)

EPSILON = 1e-5
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
SHAPES = pytest.mark.parametrize("shape", [(1, 16), (17, 172), (2, 2048), (17, 3, 96)], ids=str)


def doubles(*tensors):
    return [t.double() for t in tensors]


def check(function, reference, tensors, above, dtype):
    """Results and gradients near float64, and twice the same bits."""
    results, found = gradients(function, *tensors, above=above)
    _, again = gradients(function, *tensors, above=above)
    wide = tuple(doubles(*above)) if isinstance(above, tuple) else above.double()
    expected_results, expected = gradients(reference, *doubles(*tensors), above=wide)
    for mine, theirs in zip(results, expected_results, strict=True):
        assert_near(mine, theirs, dtype)
    for mine, other, theirs in zip(found, again, expected, strict=True):
        assert_gradient_near(mine, theirs, dtype)
        assert same_bits(mine, other)


def plain_norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, EPSILON)


@DTYPES
@SHAPES
def test_rms_norm_is_near_float64(shape, dtype):
    x, weight, above = (
        random(s, *n, dtype=dtype) for s, n in enumerate((shape, shape[-1:], shape))
    )
    check(lambda x, w: rms_norm(x, w, EPSILON), plain_norm, (x, weight), above, dtype)


def test_gradient_of_a_bfloat16_norm_s_weight_is_float32_where_the_parameter_takes_that():
    x, weight = random(0, 9, 172, dtype=BF16), torch.nn.Parameter(random(1, 172, dtype=BF16))
    weight.grad_dtype = FP32
    rms_norm(x, weight, EPSILON).backward(random(2, 9, 172, dtype=BF16))
    assert weight.grad.dtype == FP32
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


def test_a_program_that_walks_several_rows_sums_the_weight_s_gradient_of_all():
    x, weight, above = (
        random(s, *n)
        for s, n in enumerate(((WEIGHT_PARTS + 3, 520), (520,), (WEIGHT_PARTS + 3, 520)))
    )
    _, found = gradients(lambda x, w: rms_norm(x, w, EPSILON), x, weight, above=above)
    _, expected = gradients(plain_norm, *doubles(x, weight), above=above.double())
    for mine, theirs in zip(found, expected, strict=True):
        assert_gradient_near(mine, theirs, FP32)


@DTYPES
def test_rms_norm_of_a_sum_is_near_float64(dtype):
    x, change, *above = (random(s, 17, 172, dtype=dtype) for s in range(4))

    def plain(x, change, weight):
        total = x + change
        if dtype != FP32:  # the norm is that of the sum as it is stored
            total = total + (total.detach().to(dtype).double() - total.detach())
        return total, plain_norm(total, weight)

    weight = random(5, 172, dtype=dtype)
    check(
        lambda x, c, w: add_rms_norm(x, c, w, EPSILON),
        plain,
        (x, change, weight),
        tuple(above),
        dtype,
    )


@DTYPES
def test_rms_norm_of_a_sum_has_the_bits_of_the_sum_and_then_the_norm(dtype):
    x, change = (random(s, 17, 172, dtype=dtype) for s in (1, 2))
    weight = random(3, 172, dtype=dtype)
    total, normed = add_rms_norm(x, change, weight, EPSILON)
    if ON_GPU or dtype != BF16:  # the interpreter rounds to bfloat16 towards zero
        assert same_bits(total, x + change)
    assert same_bits(normed, rms_norm(total, weight, EPSILON))


@DTYPES
@pytest.mark.parametrize("width", [16, 80, 96, 128, 256])
def test_rotation_is_near_float64(width, dtype):
    """Sines of both halves are drawn apart: a backward pass that swaps them is found."""
    x, above = (random(s, 17, 3, width, dtype=dtype) for s in (1, 2))
    cosine, sine = (random(s, 17, 1, width, dtype=dtype) for s in (3, 4))

    def plain(x):
        return x * cosine.double() + x.roll(width // 2, -1) * sine.double()

    check(lambda x: rotate(x, cosine, sine), plain, (x,), above, dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 16), (17, 172), (3, 1100)], ids=str)
def test_swiglu_is_near_float64(shape, dtype):
    rows, width = shape
    x, above = 3 * random(1, rows, 2 * width, dtype=dtype), random(2, *shape, dtype=dtype)

    def plain(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    check(swiglu, plain, (x,), above, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("width", [96, 520])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(width, dtype):
    x, change = (random(s, 40, width, dtype=dtype) for s in (1, 2))
    weight, cosine, sine = (
        random(s, *n, dtype=dtype) for s, n in enumerate(((width,), (40, 1, width), (40, 1, width)))
    )
    heads = torch.stack((x, change), 1)  # [40, 2, width]
    operators = {
        "norm": lambda rows: rms_norm(x[rows], weight, EPSILON),
        "norm of heads": lambda rows: rms_norm(heads[rows, 1:], weight, EPSILON),
        "sum": lambda rows: torch.cat(add_rms_norm(x[rows], change[rows], weight, EPSILON), 1),
        "rotation": lambda rows: rotate(heads[rows], cosine[rows], sine[rows]),
        "swiglu": lambda rows: swiglu(x[rows]),
    }
    for name, operator in operators.items():
        whole = operator(slice(0, 40))
        for rows in (slice(0, 1), slice(39, 40), slice(3, 20)):
            assert same_bits(operator(rows), whole[rows]), (name, rows)
