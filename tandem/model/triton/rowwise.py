"""RMSNorm, rotary embedding and SwiGLU on tensors, differentiable: they launch the row-wise
kernels.

The last dimension of x must be contiguous; results are contiguous and of x's dtype. This file
knows no layers.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from tandem.model.triton.rowwise_kernels import (
    rms_norm_backward_kernel,
    rms_norm_kernel,
    rotate_kernel,
    swiglu_backward_kernel,
    swiglu_kernel,
)

# elements of a program that owns several rows
TILE = 1024
# programs that share the sum over rows; a constant, so that no GPU sums in another order
WEIGHT_PARTS = 256


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Norm x [T, D] or [T, n, D] by the root of its mean square, times weight [D]."""
    return _RMSNorm.apply(x, None, weight, epsilon)[1]  # type: ignore[no-any-return]


def add_rms_norm(
    x: Tensor, change: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Compute x + change [T, D] and its RMSNorm."""
    return _RMSNorm.apply(x, change, weight, epsilon)  # type: ignore[no-any-return]


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Compute x * cosine + (x with its halves swapped) * sine of x [T, n, E].

    cosine and sine are [T, 1, E] and get no gradient.
    """
    return _Rotate.apply(x, cosine, sine)  # type: ignore[no-any-return]


def swiglu(x: Tensor) -> Tensor:
    """Compute silu(gate) * up [N, I] of x [N, 2I] = (gate, up)."""
    return _SwiGLU.apply(x)  # type: ignore[no-any-return]


class _RMSNorm(torch.autograd.Function):
    """Autograd function (x, change, weight) -> (x + change, its norm), None without a change."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, change: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor | None, Tensor]:
        x, out = _aligned(x), _new(x)
        total = None if change is None else _new(x)
        rows, shape = _rows(x)
        rms_norm_kernel[(triton.cdiv(rows, shape["ROWS"]),)](
            x,
            None if change is None else _aligned(change.contiguous()),
            weight,
            total,
            out,
            rows,
            *_layout(x),
            epsilon,
            **shape,
            num_warps=_warps(shape["BLOCK"]),
        )
        ctx.save_for_backward(x if total is None else total, weight)
        ctx.epsilon = epsilon
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (above_total, above) = ctx.saved_tensors, grads
        rows, shape = _rows(x)
        programs = min(triton.cdiv(rows, shape["ROWS"]), WEIGHT_PARTS)
        parts = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
        grad_x = _new(x)
        fused = above_total is not None
        rms_norm_backward_kernel[(programs,)](
            x,
            weight,
            above.contiguous(),
            above_total.contiguous() if fused else None,
            grad_x,
            parts,
            rows,
            *_layout(x),
            ctx.epsilon,
            **shape,
            num_warps=_warps(shape["BLOCK"]),
        )
        # float32, which a parameter with a master keeps (train/optimizer.py)
        return grad_x, grad_x if fused else None, parts.sum(0), None


class _Rotate(torch.autograd.Function):
    """Autograd function of `rotate`; its backward is the transposed rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _rotate(grads[0].contiguous(), *ctx.saved_tensors, backward=True), None, None


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, backward: bool) -> Tensor:
    out, (rows, shape) = _new(x), _rows(x)
    rotate_kernel[(triton.cdiv(rows, shape["ROWS"]),)](
        x,
        cosine.contiguous(),
        sine.contiguous(),
        out,
        rows,
        *_layout(x),
        BACKWARD=backward,
        **shape,
        num_warps=_warps(shape["BLOCK"]),
    )
    return out


class _SwiGLU(torch.autograd.Function):
    """Autograd function of `swiglu`; it keeps x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        out = x.new_empty(len(x), x.shape[1] // 2)
        swiglu_kernel[(triton.cdiv(out.numel(), TILE),)](
            x, out, len(x), WIDTH=out.shape[1], BLOCK=TILE, num_warps=4
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,), above = ctx.saved_tensors, grads[0].contiguous()
        grad_x = torch.empty_like(x)
        swiglu_backward_kernel[(triton.cdiv(above.numel(), TILE),)](
            x, above, grad_x, len(x), WIDTH=above.shape[1], BLOCK=TILE, num_warps=4
        )
        return grad_x


def _new(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _aligned(x: Tensor) -> Tensor:
    """Copy x unless it begins at a multiple of 16 bytes.

    Triton lays out a row by the alignment of its address, and so orders its sum.
    """
    return x.clone() if x.data_ptr() % 16 else x


def _rows(x: Tensor) -> tuple[int, dict[str, int]]:
    """Count x's rows, and choose the tile: so many rows of BLOCK elements a program."""
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    return x.numel() // width, {"WIDTH": width, "BLOCK": block, "ROWS": max(1, TILE // block)}


def _layout(x: Tensor) -> tuple[int, int, int]:
    """Return (rows of a token, stride of tokens, stride of a token's rows) of [T, D] or [T, n,
    D]."""
    if x.stride(-1) != 1:
        found = f"a tensor {tuple(x.shape)} has strides {x.stride()}"
        raise ValueError(f"{found}, expected 1 in the last dimension")
    return (1, x.stride(0), 0) if x.dim() == 2 else (x.shape[1], x.stride(0), x.stride(1))


def _warps(block: int) -> int:
    return 4 if block <= 4096 else 8
