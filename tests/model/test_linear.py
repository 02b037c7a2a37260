"""The exact linear and SiLU: a row's bits do not depend on its neighbours, and a pack is never
stale."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tandem.model.kernels import CPU, in_use, kernels_of
from tandem.model.layers import made_again
from tandem.model.linear import ExactLinear, FusedLinear, PackedWeight
from tests.support.operators import Operators
from tests.support.tiny import noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("inner", "outputs"),
    [(16, 40), (96, 48), (96, 172), (576, 48), (576, 1536), (1536, 49), (2048, 48)],
)
def test_a_row_has_the_same_bits_beside_any_number_of_other_rows(inner, outputs, bias, dtype):
    x, weight = noise(130, inner, dtype=dtype), noise(outputs, inner, seed=1, dtype=dtype)
    packed, added = CPU.pack(weight), noise(outputs, seed=2, dtype=dtype) if bias else None
    whole = CPU.matmul(x, packed, added)
    middle = [slice(7, 10), slice(31, 33), slice(64, 97), slice(2, 102)]
    for part in (*map(slice, range(1, 71)), *(slice(n, None) for n in range(60, 130)), *middle):
        assert torch.equal(CPU.matmul(x[part].contiguous(), packed, added), whole[part]), part


def test_pack_renewed_only_when_weight_changes_in_place(monkeypatch):
    weight, cache, x = nn.Parameter(noise(16, 96)), PackedWeight(), noise(4, 96, seed=1)
    first = cache.of(weight)
    assert cache.of(weight) is first
    with torch.no_grad():
        weight.mul_(2.0)
    kernels = kernels_of(weight)
    half = kernels.pack(weight / 2)
    assert torch.equal(kernels.matmul(x, cache.of(weight)), 2 * kernels.matmul(x, half))
    with torch.no_grad():
        weight.copy_(noise(16, 96, seed=2))
    other = kernels.pack(noise(16, 96, seed=2))
    assert torch.equal(kernels.matmul(x, cache.of(weight)), kernels.matmul(x, other))
    monkeypatch.setitem(in_use, "cpu", CPU)  # which have packs of their own
    assert torch.equal(CPU.matmul(x, cache.of(weight)), CPU.matmul(x, CPU.pack(weight)))


def test_module_shares_parameters_and_keeps_leading_dimensions():
    plain = nn.Linear(96, 24)
    exact = ExactLinear(plain.weight, plain.bias)
    assert exact.weight is plain.weight
    assert {name for name, _ in exact.named_parameters()} == {"weight", "bias"}
    x = noise(2, 3, 96)
    assert exact(x).shape == (2, 3, 24)
    assert torch.equal(exact(x).view(6, 24), exact(x.view(6, 96)))
    torch.testing.assert_close(exact(x), plain(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_swiglu_is_silu_of_the_gate_times_up(scale):
    x = noise(10, 200) * scale
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = CPU.swiglu(ours), F.silu(theirs[:, :100]) * theirs[:, 100:]
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    out.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_row_of_swiglu_does_not_depend_on_rows_width_or_threads(gradients):
    x, before = noise(1501, 200), torch.get_num_threads()
    with torch.set_grad_enabled(gradients):
        whole = CPU.swiglu(x)
        for rows in (*range(1, 40), 327, 999):
            for start in (0, 3, 501):
                assert torch.equal(
                    CPU.swiglu(x[start : start + rows].clone()), whole[start : start + rows]
                )
        narrow = torch.cat([x[:, 3:40], x[:, 103:140]], 1)
        assert torch.equal(CPU.swiglu(narrow), whole[:, 3:40])
        torch.set_num_threads(2)
        two = CPU.swiglu(x)
        torch.set_num_threads(before)
    assert torch.equal(two, whole)


def adapted(outputs, inputs=96, *, rank=0, bias=False, frozen=True, seed=0):
    """An ExactLinear of random numbers; rank 0 is one without an adapter."""
    factors = (
        (nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False))
        if rank
        else (None, None)
    )
    weight, added = (
        nn.Parameter(noise(*shape, seed=seed + 1)) for shape in ((outputs, inputs), (outputs,))
    )
    exact = ExactLinear(
        weight.requires_grad_(not frozen), added if bias else None, *factors, scaling=0.5
    )
    for number, factor in enumerate(factors):
        if factor is not None:
            factor.weight = nn.Parameter(noise(*factor.weight.shape, seed=seed + 2 + number))
    return exact


def by_formula(x, part):
    """float64: x (W + 0.5 B A)^T + b, from leaves of its own; returns (output, leaves by name)."""
    leaves = {name: p.detach().double().requires_grad_() for name, p in part.named_parameters()}
    weight = leaves["weight"]
    if "lora_A.weight" in leaves:
        weight = weight + 0.5 * leaves["lora_B.weight"] @ leaves["lora_A.weight"]
    return F.linear(x, weight, leaves.get("bias")), leaves


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ranks", [(0, 0, 0), (3, 0, 0), (0, 3, 2), (1, 5, 3)])
def test_adapters_on_any_parts_run_and_learn_by_the_formula(ranks, bias, frozen):
    parts = [
        adapted(o, rank=r, bias=bias, frozen=frozen, seed=9 * o)
        for o, r in zip((24, 8, 16), ranks, strict=True)
    ]
    x, above = noise(7, 96), noise(7, 48, seed=5)
    for run, members in ((FusedLinear(*parts), parts), (parts[0], parts[:1])):
        ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
        outputs = [by_formula(theirs, part) for part in members]
        expected, out = torch.cat([y for y, _ in outputs], 1), run(ours)
        torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-4)
        with torch.no_grad():
            assert torch.equal(run(x), out)
        (out * above[:, : out.shape[1]]).sum().backward()
        (expected * above[:, : out.shape[1]]).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=1e-5, atol=1e-4)
        for part, (_, leaves) in zip(members, outputs, strict=True):
            for name, parameter in part.named_parameters():
                if parameter.requires_grad:
                    torch.testing.assert_close(
                        parameter.grad, leaves[name].grad.float(), rtol=1e-5, atol=1e-4
                    )
                else:
                    assert parameter.grad is None
            part.zero_grad()


@pytest.mark.parametrize("name", ["weight", "lora_A.weight", "lora_B.weight"])
def test_adapted_linear_packs_follow_each_of_its_tensors(name):
    parts = [adapted(8, rank=2, seed=seed) for seed in (10, 20)]
    x = noise(4, 96)
    for run in (parts[0], FusedLinear(*parts)):
        with torch.no_grad():
            before = run(x)
            dict(parts[0].named_parameters())[name].mul_(1.5)
            torch.testing.assert_close(
                run(x)[:, :8], by_formula(x.double(), parts[0])[0].float(), rtol=1e-5, atol=1e-4
            )
            assert not torch.equal(run(x), before)


def test_base_only_runs_the_base_and_trains_no_adapter():
    parts = [adapted(8, rank=2, bias=True, seed=10), adapted(8, bias=True, seed=20)]
    plain = FusedLinear(*[ExactLinear(part.weight, part.bias) for part in parts])
    fused, x = FusedLinear(*parts), noise(4, 96).requires_grad_()
    whole, base = fused(x), plain(x)
    parts[0].base_only = True
    assert torch.equal(fused(x), base) and torch.equal(parts[0](x), base[:, :8])
    fused(x).sum().backward()
    assert parts[0].lora_A.weight.grad is None and parts[0].bias.grad is not None
    parts[0].base_only = False
    assert torch.equal(fused(x), whole) and not torch.equal(whole, base)


@pytest.mark.usefixtures("plain_kernels")
def test_frozen_linear_keeps_no_activations():
    x, held = noise(64, 96).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: held.append(t.data_ptr()) or t, lambda t: t
    ):
        frozen, learning = (adapted(32, frozen=f)(x).sum() for f in (True, False))
    assert held.count(x.data_ptr()) == 1  # the learning one's
    for loss, products in ((frozen, 1), (learning, 2)):
        with Operators() as ran:
            loss.backward()
        assert ran.products == products


def test_transposed_view_is_no_tensor_that_is_made_again():
    """Its address and its shape, [4, 4], are those of the tensor itself."""
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    grads = []
    for again in (False, True):
        w = weight.clone().requires_grad_()
        made = x * 2
        with made_again(made, lambda: x * 2, again):
            (made.t() @ w).square().sum().backward()
        grads.append(w.grad)
    assert torch.equal(*grads)
