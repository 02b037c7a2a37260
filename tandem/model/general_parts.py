"""Exact parts for general.py in place of transformers': layer norms, short convolutions, and
attention with linear biases.

The gradients of a layer norm (Ba et al. 2016, arXiv 1607.06450) are sums over rows, a column at a
time: torch sums them in one buffer a thread.

A short convolution (LFM2, arXiv 2511.23404) mixes each token with the few before it, number by
number. Those are looked up by the plan of the pass: in the packed rows, or in the layer's pages,
which hold the convolution's inputs in place of keys.

A linear bias (ALiBi, arXiv 2108.12409, of Bloom) is a key's position, times the slope of a head.
Both take part in the product of queries and keys, as further numbers of each
(config_file.BIAS_SIZE), so pages hold a key's position beside the key.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ONE_PLUS = "NemotronLayerNorm1P"  # transformers' class that adds one to its weight
NORMS = ("LayerNorm", ONE_PLUS)
CONVOLUTIONS = ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv")
BIASED = "BloomAttention"
BASE = 256  # bfloat16 has every whole number up to it, so positions are in two digits


class ExactLayerNorm(nn.Module):
    """A norm over the last dimension, with the parameters of one of NORMS."""

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


class ExactShortConv(nn.Module):
    """A layer of one of CONVOLUTIONS, with its parameters under their names. plan: that of the
    pass."""

    def __init__(self, layer: Any, plan: Callable[[], Any]):
        super().__init__()
        self.in_proj, self.conv, self.out_proj = layer.in_proj, layer.conv, layer.out_proj
        self.layer_idx, self._plan = layer.layer_idx, plan

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        """Map [1, T, D] to [1, T, D]. transformers calls it, with its own names."""
        before, after, x = self.in_proj(hidden_states[0]).chunk(3, -1)
        x, weight = before * x, self.conv.weight[:, 0].float()
        total, before_each = x.float() * weight[:, -1], self._plan().earlier
        for lag, earlier in enumerate(before_each(self.layer_idx, x, weight.shape[1] - 1), 1):
            total = total + earlier.float() * weight[:, -1 - lag]
        if self.conv.bias is not None:
            total = total + self.conv.bias
        return self.out_proj(after * total.to(x.dtype))[None]  # type: ignore[no-any-return]


class ExactBloomAttention(nn.Module):
    """A layer of BIASED, with its parameters under their names. attend: as transformers'
    AttentionInterface; positions: returns those of the pass, int64 [T]."""

    def __init__(self, layer: Any, attend: Callable[..., Any], positions: Callable[[], Tensor]):
        super().__init__()
        self.query_key_value, self.dense = layer.query_key_value, layer.dense
        self.layer_idx, self._size = layer.layer_idx, layer.head_dim
        self._attend, self._positions, self._scale = attend, positions, layer.head_dim**-0.5
        # the product is scaled, the bias is not: [H, 2], a number for each digit of a position
        self._bias = slopes(layer.num_heads)[:, None] / self._scale * torch.tensor([BASE, 1.0])

    def forward(
        self, hidden_states: Tensor, residual: Tensor, **others: Any
    ) -> tuple[Tensor, None]:
        """Map [1, T, D] to [1, T, D]. transformers calls it, with its own names."""
        rows, heads = hidden_states.shape[1], len(self._bias)
        q, k, v = self.query_key_value(hidden_states).view(rows, heads, 3, self._size).unbind(2)
        position = self._positions()
        digits = torch.stack([position // BASE, position % BASE], -1)
        q = torch.cat([q, self._bias.to(q.dtype).expand(rows, -1, -1)], -1)
        k = torch.cat([k, digits.to(k.dtype)[:, None].expand(-1, heads, -1)], -1)
        sides = (side.transpose(0, 1)[None] for side in (q, k, v))
        out, _ = self._attend(self, *sides, None, scaling=self._scale)
        return self.dense(out.reshape(1, rows, -1)) + residual, None


def slopes(heads: int) -> Tensor:
    """Compute the slope of each head, float32 [H]: the powers of 2 ** (-8 / P), where P is the
    largest power of two up to H, and for further heads every second power of 2 ** (-4 / P)."""
    even = 2 ** int(math.log2(heads))
    own = [2.0 ** (-8 * number / even) for number in range(1, even + 1)]
    between = [2.0 ** (-4 * number / even) for number in range(1, 2 * (heads - even) + 1, 2)]
    return torch.tensor(own + between)
