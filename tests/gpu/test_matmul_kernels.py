"""The walks over a matmul's tiles have the same bits, and the linear has gradients over them."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tandem.jobs.engines import choose_matmul
from tandem.model.linear import Adapter, ExactLinear, Part, fused_linear
from tandem.model.load import make_exact
from tandem.model.probe import try_matmuls
from tandem.plugins.triton.matmul import PLAIN, TILES, matmul, tile_of
from tandem.plugins.triton.plans import TRITON
from tandem.plugins.triton.rowwise import swiglu
from tests.support.kernels import (
    BF16,
    DEVICE,
    FP32,
    assert_gradient_near,
    gradients,
    random,
    same_bits,
    triton_everywhere,
)
from tests.support.tiny import stock_model, tiny_config


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


@pytest.mark.parametrize("kernel", ["persistent", "tma"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_of_all_sizes_have_the_bits_of_the_plain_one(tile, kernel):
    """Also where a residual is added to the product, and where gate and up are joined."""
    x, weight, bias = (
        random(s, *n, dtype=BF16) for s, n in enumerate(((70, 136), (90, 136), (90,)))
    )
    own, residual = {"tile": tile}, random(4, 70, 90, dtype=BF16)
    made = matmul(x, weight, bias)
    assert same_bits(matmul(x, weight, bias, kernel, **own), made)
    found = matmul(x, weight, bias, kernel, residual=residual, **own)
    assert same_bits(found.to(BF16), residual + made)
    assert same_bits(matmul(x, weight, bias, kernel, gated=True, **own), swiglu(made))


def test_few_rows_take_small_tiles_and_many_rows_large_ones():
    few, many = tile_of(1, 4096, 2, 132), tile_of(8192, 1024, 2, 132)
    assert (few, many) == (TILES[-1], TILES[0]) and tile_of(8192, 1024, 4, 132) == PLAIN
    rows = [tile_of(2**n, 4096, 2, 132).rows for n in range(14)]
    assert rows == sorted(rows)


def test_rows_that_no_descriptor_describes_are_read_through_pointers():
    x, weight = random(1, 5, 40), random(2, 7, 40)
    assert same_bits(
        matmul(x[:, 4:12], weight[:, :8], None, "tma"), matmul(x[:, 4:12], weight[:, :8])
    )
    for odd in (x[:, 1:9], random(1, 5, 9)[:, :8]):
        assert same_bits(matmul(odd, weight[:, :8], None, "tma"), matmul(odd, weight[:, :8]))


@pytest.fixture
def plain_again():
    yield
    TRITON.use_matmul("plain")


def small_model():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    config = tiny_config("mistral", **sizes, num_attention_heads=2, num_key_value_heads=1)
    return make_exact(stock_model(config, seed=0).to(DEVICE))


def test_the_probe_tries_every_kernel_on_the_linears_of_a_model(plain_again):
    with triton_everywhere():
        trials = try_matmuls(small_model(), time_ms=lambda work: 1.0 if work() else 0.0)
    assert [trial.kernel for trial in trials] == list(TRITON.matmuls) and TRITON.chosen == "plain"
    assert not any(trial.findings for trial in trials[:3]), trials


class OddHead(ExactLinear):
    """Other bits for three rows, as another kernel would give."""

    def forward(self, x):
        out = super().forward(x)
        return out.nextafter(out + 1) if len(x) == 3 else out


def test_the_output_projection_is_tried_with_rows_that_no_pass_pads(plain_again):
    model = small_model()
    model.head.__class__ = OddHead
    with triton_everywhere():
        trials = try_matmuls(model, time_ms=lambda work: 1.0)
    assert all(trial.findings == ["linear 32 -> 97: 3 rows"] for trial in trials[:3]), trials


def test_a_run_goes_on_with_the_kernel_that_it_has_taken(plain_again):
    told = []
    with triton_everywhere():
        choose_matmul(small_model(), 0, told.append, before="persistent")
    assert TRITON.chosen == "persistent" and told == []


@pytest.mark.parametrize("kernel", TRITON.matmuls)
def test_a_linear_takes_the_kernel_in_use(kernel, plain_again):
    x, weight, bias = random(1, 5, 40), random(2, 7, 40), random(3, 7)
    TRITON.use_matmul(kernel)
    with triton_everywhere():
        found = TRITON.matmul(x, weight, bias)
    if kernel == "cublas":
        assert same_bits(found, torch.nn.functional.linear(x, weight, bias))
    else:
        assert same_bits(found, matmul(x, weight, bias, kernel))


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
        return fused_linear(x, parts, TRITON.pack(torch.cat([part.merged() for part in parts])))

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
