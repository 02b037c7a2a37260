"""Products of gradients: near to float64, and the same bits for any threads and any strides."""

import pytest
import torch

from tandem.model.linear import Adapter, Part, _input_gradient
from tandem.model.onednn import (
    LONGEST,
    OUTPUTS,
    TILE_TERMS,
    bfloat16_unit,
    gradient_product,
    product,
    weight_gradient,
)
from tandem.model.schedule import threads_of
from tests.support.tiny import noise

THREADS = (1, 2, 3, 6)


def same_on_any_threads(product):
    found = []
    for count in THREADS:
        with threads_of(count):
            found.append(product())
    assert all(torch.equal(found[0], other) for other in found)
    return found[0]


@pytest.mark.parametrize(
    "rows, inner, columns",
    [(0, 4, 3), (1, 4, 3), (7, 30, 6), (300, 96, 64), (64, 3 * LONGEST + 5, 64)],
)
def test_gradient_product_is_near_and_thread_independent(rows, inner, columns):
    a, b = noise(rows, inner), noise(inner, columns, seed=1)
    found = same_on_any_threads(lambda: gradient_product(a, b))
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("rows", [0, 1, 63, 256, 300, 1100, LONGEST + 300])
@pytest.mark.parametrize("outputs, inputs", [(6, 8), (96, 32)])
def test_weight_gradient_is_near_and_thread_independent(rows, outputs, inputs):
    above, x = noise(rows, outputs), noise(rows, inputs, seed=1)
    found = same_on_any_threads(lambda: weight_gradient(above, x))
    torch.testing.assert_close(
        found.double(), above.double().t() @ x.double(), rtol=1e-4, atol=5e-4
    )


def test_slices_and_transposes_have_the_bits_of_copies():
    wide, weight = noise(50, 90), noise(70, 30, seed=1)
    part = wide[:, 20:50]
    assert torch.equal(
        gradient_product(part, weight.t()), gradient_product(part.clone(), weight.t().contiguous())
    )
    x = noise(50, 12, seed=2)
    assert torch.equal(weight_gradient(part, x), weight_gradient(part.clone(), x))


def test_a_weight_gradient_is_added_to_a_total_in_place():
    above, x = noise(64, OUTPUTS + 10), noise(64, 5, seed=1)
    total = before = noise(OUTPUTS + 10, 5, seed=2)
    expected = before + weight_gradient(above, x)
    assert weight_gradient(above, x, total) is total
    assert torch.equal(total, expected)


@pytest.mark.parametrize("terms", [TILE_TERMS, 512, 1024, 2048, 4096 + 5])
@pytest.mark.parametrize("rows, columns", [(32, 128), (37, 192), (100, 576), (128, 16)])
def test_products_of_bfloat16_are_near_and_thread_independent(terms, rows, columns):
    a, b = noise(rows, terms).bfloat16(), noise(terms, columns, seed=1).bfloat16()
    for find in (
        lambda: gradient_product(a, b),
        lambda: weight_gradient(a.t().contiguous(), b),
        lambda: product(a.t().contiguous().t(), b),
    ):
        found = same_on_any_threads(find)
        expected = a.double() @ b.double()
        assert (found.double() - expected).abs().max() < 2**-7 * expected.abs().max()
    adapter = Adapter(b, noise(8, terms, seed=2).bfloat16(), 0.1)
    part, above = Part(b[:8], None, adapter), a[:, :8].contiguous()
    same_on_any_threads(lambda: _input_gradient([above], [part]))


def test_bfloat16_is_multiplied_by_the_best_unit_that_onednn_may_use(monkeypatch):
    units = {"ALL": "tiles", "avx512_core_bf16": "pairs", "AVX10_1_512": "pairs", "AVX512_CORE": ""}
    for there in (("amx_tile", "avx512_bf16"), ("avx512_bf16",), ()):
        for part in ("amx_tile", "avx512_bf16"):
            monkeypatch.setattr(torch.cpu, f"_is_{part}_supported", lambda has=part in there: has)
        for limit, unit in units.items():
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
            best = "pairs" if unit == "tiles" and len(there) == 1 else unit
            assert bfloat16_unit.__wrapped__() == (best if there else "")
