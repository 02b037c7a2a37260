"""The exact linear shared by engine and trainer: an output row has the same bits whatever rows surround it.

Forward runs oneDNN on a prepacked weight, which keeps an output row independent of the number of rows for every
count but one: with AVX-512 and more than 1,024 inputs a *single* row takes another kernel. oneDNN compiles and keeps a
kernel for every row count it meets (about 0.5 ms and 1 MB each), so counts are rounded up to a ladder (`padded_rows`)
that starts at 4: four rows are no slower than one.

Backward is plain matmul: gradients are deterministic, not batch-invariant. The pack follows the weight's version
counter, so a stale pack cannot be used. Where oneDNN's operators are missing, rows are padded to a multiple of 4 for
plain `F.linear`; `probe` says whether that is exact on the machine at hand.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.model.kernels import triton_for

# The one place where private PyTorch operators are looked for.
HAS_PREPACKED = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_PACK_ROWS_HINT = 32


def pack(weight: Tensor) -> Tensor:
    """The weight [O, I] reordered for `multiply`; itself where there is nothing to reorder."""
    if not HAS_PREPACKED or triton_for(weight):
        return weight.detach()
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACK_ROWS_HINT)


def padded_rows(rows: int) -> int:
    """The count of the ladder that holds rows: multiples of 4, at most 1/16 too many beyond 64."""
    step = max(4, (1 << rows.bit_length()) // 32)
    return rows + -rows % step


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, I] -> [N, O]."""
    if triton := triton_for(x):
        return triton.matmul(x, packed, bias)  # type: ignore[no-any-return]
    rows = x.shape[0]
    if HAS_PREPACKED:
        padded = padded_rows(rows)
        if padded != rows:
            x = F.pad(x, (0, 0, 0, padded - rows))
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")[:rows]
    return F.linear(F.pad(x, (0, 0, 0, -rows % 4)), packed, bias)[:rows]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return multiply(x, packed, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = grad.t() @ x if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad.sum(0) if ctx.has_bias else None, None


class PackedWeight:
    """The pack of one weight, or of several stacked, renewed when one has changed in place (an optimizer step, a load)."""

    def __init__(self) -> None:
        self._versions: tuple[int, ...] = ()
        self._packed: Tensor | None = None

    def of(self, *weights: Tensor) -> Tensor:
        versions = tuple(weight._version for weight in weights)
        if self._packed is None or self._versions != versions:
            self._packed, self._versions = None, versions  # the old pack goes before the new one is made
            self._packed = pack(weights[0] if len(weights) == 1 else torch.cat([w.detach() for w in weights]))
        return self._packed


class ExactLinear(nn.Module):
    """nn.Linear with the exact forward; it takes over the parameters, so names and ties stay."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.pack = PackedWeight()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return linear(flat, self.weight, self.bias, self.pack.of(self.weight)).view(*x.shape[:-1], -1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor) -> Tensor:
    """x [N, I], weight [O, I] -> [N, O]; differentiable when gradients are on, lean when they are off."""
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias, packed)  # type: ignore[no-any-return]
    return multiply(x, packed, bias)


class FusedLinear:
    """Several ExactLinears of the same input as one: x [N, I] -> [N, sum of outputs]. The parameters stay theirs."""

    def __init__(self, *parts: ExactLinear):
        self.parts = parts
        self.pack = PackedWeight()

    def __call__(self, x: Tensor) -> Tensor:
        weights = [part.weight for part in self.parts]
        biases: list[Tensor] = [part.bias for part in self.parts if part.bias is not None]
        packed = self.pack.of(*weights)
        if torch.is_grad_enabled():
            return _Fused.apply(x, packed, len(weights), *weights, *biases)  # type: ignore[no-any-return]
        return multiply(x, packed, torch.cat(biases) if biases else None)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, count: int, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters[:count])
        ctx.biases = len(parameters) - count
        return multiply(x, packed, torch.cat(parameters[count:]) if ctx.biases else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        parts = grads[0].split([len(weight) for weight in weights], 1)
        grad_x = parts[0] @ weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            grad_x.addmm_(part, weight)
        grad_biases = [part.sum(0) for part in parts[: ctx.biases]]
        return grad_x, None, None, *(part.t() @ x for part in parts), *grad_biases


def swiglu(x: Tensor) -> Tensor:
    """x [N, 2I], gate and up side by side -> silu(gate) * up [N, I], from `exp`, add, divide and multiply.

    torch's own silu computes the last few elements of a chunk with another exp, so its bits depend on how many
    elements there are and on the thread count (measured: 1 element in 25 of a short tail differs).
    """
    return _SwiGLU.apply(x) if torch.is_grad_enabled() else _swiglu(x)  # type: ignore[no-any-return]


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    inner = gate.neg().exp_().add_(1.0)
    return torch.div(gate, inner, out=inner).mul_(up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _swiglu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        grad_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return torch.cat((grad_gate, grads[0] * F.silu(gate)), -1)
