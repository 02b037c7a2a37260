"""The exact linear and SiLU: a row's bits do not depend on its neighbours, and a pack is never stale."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tandem.model.linear import ExactLinear, ExactSiLU, PackedWeight, linear, multiply, pack, padded_rows


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("inner", [96, 576, 1536, 2048])
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_has_the_same_bits_beside_any_number_of_other_rows(inner, bias):
    x, packed = noise(70, inner), pack(noise(48, inner, seed=1))
    added = noise(48, seed=2) if bias else None
    whole = multiply(x, packed, added)
    for rows in range(1, 71):
        assert torch.equal(multiply(x[:rows], packed, added), whole[:rows]), f"first {rows} rows"
        assert torch.equal(multiply(x[70 - rows :], packed, added), whole[70 - rows :]), f"last {rows} rows"


@pytest.mark.parametrize("bias", [False, True])
def test_forward_and_gradients_are_those_of_a_plain_linear(bias):
    parts = [noise(9, 96), noise(40, 96, seed=1)] + ([noise(40, seed=2)] if bias else [])
    ours = [t.clone().requires_grad_() for t in parts]
    theirs = [t.double().requires_grad_() for t in parts]
    x, weight = ours[:2]
    out = linear(x, weight, ours[2] if bias else None, pack(weight))
    expected = F.linear(*theirs)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    (out * noise(9, 40, seed=3)).sum().backward()
    (expected * noise(9, 40, seed=3)).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=1e-5, atol=1e-5)


def test_only_the_gradients_that_are_wanted_are_made():
    x, weight = noise(4, 96), noise(8, 96, seed=1).requires_grad_()
    linear(x, weight, None, pack(weight)).sum().backward()
    assert x.grad is None and weight.grad is not None


def test_with_and_without_gradients_the_bits_are_the_same():
    x, weight = noise(5, 96), noise(8, 96, seed=1).requires_grad_()
    recorded = linear(x, weight, None, pack(weight))
    with torch.no_grad():
        assert torch.equal(linear(x, weight, None, pack(weight)), recorded)


def test_the_ladder_of_row_counts_holds_every_count_with_few_steps_and_little_waste():
    assert [padded_rows(n) for n in (1, 2, 3, 4, 5, 8, 9, 63, 64, 65, 70)] == [2, 2, 3, 4, 8, 8, 12, 64, 64, 68, 72]
    for rows in range(1, 5000):
        padded = padded_rows(rows)
        assert padded >= rows and padded_rows(padded) == padded >= 2
        assert rows <= 64 or padded - rows <= rows / 16
    steps = {padded_rows(n) for n in range(1, 8193)}
    assert len(steps) < 150 and sorted(steps) == sorted({padded_rows(s) for s in steps})


def test_the_pack_is_kept_while_the_weight_is_and_renewed_when_it_changes_in_place():
    weight, cache, x = nn.Parameter(noise(16, 96)), PackedWeight(), noise(4, 96, seed=1)
    first = cache.of(weight)
    assert cache.of(weight) is first
    with torch.no_grad():
        weight.mul_(2.0)
    assert torch.equal(multiply(x, cache.of(weight)), 2 * multiply(x, pack(weight / 2)))
    with torch.no_grad():
        weight.copy_(noise(16, 96, seed=2))
    assert torch.equal(multiply(x, cache.of(weight)), multiply(x, pack(noise(16, 96, seed=2))))


def test_the_module_takes_over_the_parameters_and_keeps_the_leading_dimensions():
    plain = nn.Linear(96, 24)
    exact = ExactLinear(plain.weight, plain.bias)
    assert exact.weight is plain.weight and dict(exact.named_parameters()).keys() == {"weight", "bias"}
    x = noise(2, 3, 96)
    assert exact(x).shape == (2, 3, 24)
    assert torch.equal(exact(x).view(6, 24), exact(x.view(6, 96)))
    torch.testing.assert_close(exact(x), plain(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_exact_silu_is_silu(scale):
    x = noise(1000) * scale
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = ExactSiLU()(ours), F.silu(theirs)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


def test_the_exact_silu_has_its_limits_at_the_ends_of_the_numbers():
    ends = torch.tensor([0.0, -200.0, 200.0, -3e38, 3e38])
    assert torch.equal(ExactSiLU()(ends), torch.tensor([0.0, 0.0, 200.0, 0.0, 3e38]))


@pytest.mark.parametrize("gradients", [False, True])
def test_the_exact_silu_of_an_element_does_not_depend_on_size_place_or_threads(gradients):
    silu, x, before = ExactSiLU(), noise(150_001), torch.get_num_threads()
    with torch.set_grad_enabled(gradients):
        whole = silu(x)
        for size in (*range(1, 40), 1001, 32_769, 99_999):
            for start in (0, 3, 50_001):
                assert torch.equal(silu(x[start : start + size].clone()), whole[start : start + size])
        torch.set_num_threads(2)
        two = silu(x)
        torch.set_num_threads(before)
    assert torch.equal(two, whole)
