"""Exact attention with linear biases (ALiBi, arXiv 2108.12409) of Bloom, for general.py.

The bias of a key is its position, times the slope of a head. Both take part in the product of
queries and keys, as further numbers of each (config_file.BIAS_SIZE), so pages hold a key's position
beside the key.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CLASS = "BloomAttention"
BASE = 256  # bfloat16 has every whole number up to it, so positions are in two digits


class ExactBloomAttention(nn.Module):
    """A layer of CLASS, with its parameters under their names. attend: as transformers'
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
        fused = self.query_key_value(hidden_states).view(rows, heads, 3, self._size)
        q, k, v = fused.unbind(2)
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


def put_linear_biases(
    module: Any, attend: Callable[..., Any], positions: Callable[[], Tensor]
) -> None:
    """Put exact attention with linear biases into a transformers module in place."""
    for layer in module.modules():
        for name, child in list(layer.named_children()):
            if type(child).__name__ == CLASS:
                setattr(layer, name, ExactBloomAttention(child, attend, positions))
