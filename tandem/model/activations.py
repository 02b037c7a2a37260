"""transformers' activation functions from `exp`, `erf` and plain arithmetic, for general.py.

torch's own silu, gelu and sigmoid compute the last few elements of a chunk by other instructions,
so that their bits depend on how many elements there are and on the threads; so do their gradients.
Arithmetic is float32; a result is rounded once.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

KINDS = {  # by the name of transformers' class, or torch's
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "Sigmoid": "sigmoid",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "BloomGelu": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
}
QUICK = 1.702  # of quick_gelu, x sigmoid(1.702 x)


class ExactActivation(nn.Module):
    """An activation of a kind of `KINDS`."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Activation.apply(x, self.kind)  # type: ignore[no-any-return]
        return activate(x.float(), self.kind).to(x.dtype)


def activate(x: Tensor, kind: str) -> Tensor:
    """Compute the activation of x, without gradients."""
    match kind:
        case "silu":
            return x / x.neg().exp_().add_(1.0)
        case "sigmoid":
            return x.neg().exp_().add_(1.0).reciprocal_()
        case "quick_gelu":
            return x / x.mul(-QUICK).exp_().add_(1.0)
        case "gelu":
            return x.mul(math.sqrt(0.5)).erf_().add_(1.0).mul_(x).mul_(0.5)
    inner = (x * x * x).mul_(0.044715).add_(x).mul_(math.sqrt(2.0 / math.pi))
    return exact_tanh(inner).add_(1.0).mul_(x).mul_(0.5)


def slope(x: Tensor, kind: str) -> Tensor:
    """Compute the derivative of the activation at x."""
    match kind:
        case "silu" | "quick_gelu":
            inner = QUICK * x if kind == "quick_gelu" else x
            sigmoid = activate(inner, "sigmoid")
            return (1.0 - sigmoid).mul_(inner).add_(1.0).mul_(sigmoid)
        case "sigmoid":
            sigmoid = activate(x, "sigmoid")
            return (1.0 - sigmoid).mul_(sigmoid)
        case "gelu":
            density = (x * x).mul_(-0.5).exp_().mul_(math.sqrt(0.5 / math.pi))
            return x.mul(math.sqrt(0.5)).erf_().add_(1.0).mul_(0.5).add_(density.mul_(x))
    square, factor = x * x, math.sqrt(2.0 / math.pi)
    tanh = exact_tanh((square * x).mul_(0.044715).add_(x).mul_(factor))
    bend = square.mul_(3 * 0.044715).add_(1.0).mul_(factor).mul_(x)
    return (1.0 - tanh * tanh).mul_(bend).add_(tanh).add_(1.0).mul_(0.5)


def exact_tanh(x: Tensor) -> Tensor:
    """Compute tanh from `exp`."""
    e = x.abs().mul_(-2.0).exp_()
    return torch.copysign((1.0 - e).div_(e.add_(1.0)), x)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Bound logits smoothly to -cap .. cap (Gemma 2, arXiv 2408.00118, section 2)."""
    return exact_tanh(logits / cap).mul_(cap)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return activate(x.float(), kind).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return slope(ctx.saved_tensors[0].float(), ctx.kind).mul_(grads[0]).to(grads[0].dtype), None
