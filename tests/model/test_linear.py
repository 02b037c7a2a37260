"""The exact linear and SiLU: a row's bits do not depend on its neighbours, and a pack is never stale."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tandem.model.linear import ExactLinear, FusedLinear, PackedWeight, linear, multiply, pack, padded_rows, swiglu


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
    assert [padded_rows(n) for n in (1, 2, 3, 4, 5, 8, 9, 63, 64, 65, 70)] == [4, 4, 4, 4, 8, 8, 12, 64, 64, 68, 72]
    for rows in range(1, 5000):
        padded = padded_rows(rows)
        assert padded >= rows and padded_rows(padded) == padded >= 4
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
def test_swiglu_is_silu_of_the_gate_times_up(scale):
    x = noise(10, 200) * scale
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = swiglu(ours), F.silu(theirs[:, :100]) * theirs[:, 100:]
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    out.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6)


def test_swiglu_has_its_limits_at_the_ends_of_the_numbers():
    ends = torch.tensor([0.0, -200.0, 200.0, -3e38, 3e38])
    assert torch.equal(swiglu(torch.cat([ends, torch.ones(5)])), torch.tensor([0.0, 0.0, 200.0, 0.0, 3e38]))


@pytest.mark.parametrize("gradients", [False, True])
def test_a_row_of_swiglu_does_not_depend_on_rows_width_or_threads(gradients):
    x, before = noise(1501, 200), torch.get_num_threads()
    with torch.set_grad_enabled(gradients):
        whole = swiglu(x)
        for rows in (*range(1, 40), 327, 999):
            for start in (0, 3, 501):
                assert torch.equal(swiglu(x[start : start + rows].clone()), whole[start : start + rows])
        narrow = torch.cat([x[:, 3:40], x[:, 103:140]], 1)
        assert torch.equal(swiglu(narrow), whole[:, 3:40])
        torch.set_num_threads(2)
        two = swiglu(x)
        torch.set_num_threads(before)
    assert torch.equal(two, whole)


@pytest.mark.parametrize("bias", [False, True])
def test_fused_linears_are_their_parts_side_by_side_with_the_gradients_of_each(bias):
    parts = [
        ExactLinear(nn.Parameter(noise(o, 96, seed=o)), nn.Parameter(noise(o, seed=o)) if bias else None)
        for o in (24, 8, 8)
    ]
    fused, x = FusedLinear(*parts), noise(7, 96)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = fused(ours), torch.cat([F.linear(theirs, p.weight, p.bias) for p in parts], 1)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(fused(x), out)
    above = noise(7, 40, seed=9)
    (out * above).sum().backward()
    grads = [p.grad.clone() for part in parts for p in part.parameters()]
    for part in parts:
        part.zero_grad()
    (expected * above).sum().backward()
    for one, other in zip(
        [ours.grad, *grads], [theirs.grad, *(p.grad for part in parts for p in part.parameters())], strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_the_pack_of_fused_linears_follows_each_of_their_weights():
    parts = [ExactLinear(nn.Parameter(noise(8, 96, seed=o))) for o in (1, 2)]
    fused, x = FusedLinear(*parts), noise(4, 96)
    with torch.no_grad():
        before = fused(x)
        parts[1].weight.mul_(2.0)
        assert torch.equal(fused(x), torch.cat([before[:, :8], 2 * before[:, 8:]], 1))
