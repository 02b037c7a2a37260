"""The exact linear shared by engine and trainer: an output row has the same bits whatever rows surround it.

Forward runs oneDNN on a prepacked weight, which keeps an output row independent of the number of rows for every
count but one: with AVX-512 and more than 1,024 inputs a *single* row takes another kernel, so it runs as two. oneDNN
compiles and keeps a kernel for every row count it meets (about 0.5 ms and 1 MB each), so counts are rounded up to a
ladder (`padded_rows`).

Backward is plain matmul: gradients are deterministic, not batch-invariant. The pack follows the weight's version
counter, so a stale pack cannot be used. Where oneDNN's operators are missing, rows are padded to a multiple of 4 for
plain `F.linear`; `probe` says whether that is exact on the machine at hand.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The one place where private PyTorch operators are looked for.
HAS_PREPACKED = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_PACK_ROWS_HINT = 32


def pack(weight: Tensor) -> Tensor:
    """The weight [O, I] reordered for `multiply`; itself where there is nothing to reorder."""
    if not HAS_PREPACKED or weight.device.type != "cpu":
        return weight.detach()
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACK_ROWS_HINT)


def padded_rows(rows: int) -> int:
    """The count of the ladder that holds rows: 2, 3, then multiples of 4, at most 1/16 too many beyond 64."""
    if rows <= 4:
        return max(rows, 2)
    step = max(4, (1 << rows.bit_length()) // 32)
    return rows + -rows % step


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, I] -> [N, O]."""
    rows = x.shape[0]
    if HAS_PREPACKED and x.device.type == "cpu":
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
    """The pack of one weight, renewed when the weight has changed in place (an optimizer step, a load)."""

    def __init__(self) -> None:
        self._version = -1
        self._packed: Tensor | None = None

    def of(self, weight: Tensor) -> Tensor:
        if self._packed is None or self._version != weight._version:
            self._packed, self._version = None, weight._version  # the old pack goes before the new one is made
            self._packed = pack(weight)
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


class ExactSiLU(nn.Module):
    """x * sigmoid(x) from `exp`, add and divide.

    torch's own silu computes the last few elements of a chunk with another exp, so its bits depend on how many
    elements there are and on the thread count (measured: 1 element in 25 of a short tail differs).
    """

    def forward(self, x: Tensor) -> Tensor:
        return _SiLU.apply(x) if torch.is_grad_enabled() else _silu(x)  # type: ignore[no-any-return]


def _silu(x: Tensor) -> Tensor:
    return x / x.neg().exp_().add_(1.0)


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _silu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.ops.aten.silu_backward(grads[0], ctx.saved_tensors[0])  # type: ignore[no-any-return]
