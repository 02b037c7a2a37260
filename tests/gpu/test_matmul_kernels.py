"""The walks over a matmul's tiles have the same bits, and the linear has gradients over them."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tandem.model.linear import Adapter, Part, fused_linear, pack
from tandem.model.triton.dispatch import triton_everywhere
from tandem.model.triton.ops import matmul
from tests.support.kernels import BF16, FP32, assert_gradient_near, gradients, random, same_bits


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kernel", ["persistent", "tma"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 70, 136), (650, 70, 8), (70, 200, 72)])
def test_persistent_programs_and_descriptors_have_the_bits_of_the_plain_kernel(
    rows, outputs, inputs, kernel, dtype, bias
):
    x, weight = random(1, rows, inputs, dtype=dtype), random(2, outputs, inputs, dtype=dtype)
    b = random(3, outputs, dtype=dtype) if bias else None
    assert same_bits(matmul(x, weight, b, kernel), matmul(x, weight, b))


def test_descriptors_need_rows_of_whole_sixteen_bytes():
    x, weight = random(1, 5, 40), random(2, 7, 40)
    assert same_bits(
        matmul(x[:, 4:12], weight[:, :8], None, "tma"), matmul(x[:, 4:12], weight[:, :8])
    )
    for wrong in (x[:, 1:9], random(1, 5, 9)[:, :8]):
        with pytest.raises(ValueError, match="whole 16 bytes"):
            matmul(wrong, weight[:, :8], None, "tma")


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradients_of_the_linear_are_near_float64(dtype):
    """Two linears in one, the second with an adapter; the same bits twice."""
    x, first, second = (
        random(s, *n, dtype=dtype) for s, n in enumerate(((17, 70), (9, 70), (5, 70)))
    )
    both, bias = random(8, 9, dtype=dtype), random(9, 5, dtype=dtype)
    a, b = random(10, 3, 70, dtype=dtype), random(11, 5, 3, dtype=dtype)
    above = random(7, 17, 14, dtype=dtype)

    def run(x, first, second, both, bias, a, b):
        parts = Part(first, both), Part(second, bias, Adapter(a, b, 0.5))
        return fused_linear(x, parts, pack(torch.cat([part.merged() for part in parts])))

    def plain(x, first, second, both, bias, a, b):
        return torch.cat((x @ first.t() + both, x @ (second + 0.5 * b @ a).t() + bias), 1)

    tensors = x, first, second, both, bias, a, b
    with triton_everywhere():
        (found,), gradient = gradients(run, *tensors, above=above)
        _, again = gradients(run, *tensors, above=above)
    (expected,), reference = gradients(plain, *(t.double() for t in tensors), above=above.double())
    assert_gradient_near(found, expected, dtype)
    for mine, other, theirs in zip(gradient, again, reference, strict=True):
        assert_gradient_near(mine, theirs, dtype)
        assert same_bits(mine, other)
