"""Layer norm (Ba et al. 2016, arXiv 1607.06450) whose gradients do not depend on the threads, for
general.py.

The forward pass is torch's. torch sums the gradients of weight and bias in one buffer a thread;
here they are sums over rows, a column at a time.
"""

from typing import Any

import torch
from torch import Tensor, nn

ONE_PLUS = "NemotronLayerNorm1P"  # transformers' class that adds one to its weight
CLASSES = ("LayerNorm", ONE_PLUS)


class ExactLayerNorm(nn.Module):
    """A norm over the last dimension, with the parameters of one of `CLASSES`."""

    def __init__(self, norm: Any):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.shift = float(type(norm).__name__ == ONE_PLUS)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.shift if self.shift else self.weight
        return _LayerNorm.apply(x, weight, self.bias, self.eps)  # type: ignore[no-any-return]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        out, mean, scale = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, scale, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, mean, scale, weight, bias), above = ctx.saved_tensors, grads[0].contiguous()
        inner, _, _ = torch.ops.aten.native_layer_norm_backward(
            above, x, weight.shape, mean, scale, weight, bias, [True, False, False]
        )
        rows = above.view(-1, weight.numel())
        of_weight = (above * ((x - mean) * scale)).view_as(rows).sum(0)
        return inner, of_weight, None if bias is None else rows.sum(0), None
