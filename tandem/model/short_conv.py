"""Exact short convolutions over the tokens of a sequence (LFM2, arXiv 2511.23404), for general.py.

Such a layer mixes each token with the few before it, number by number. Those are looked up by the
plan of the pass: in the packed rows, or in the layer's pages, which hold the convolution's inputs
in place of keys. The sum over them is plain arithmetic in float32, in a fixed order.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

CLASSES = ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv")


class History(Protocol):
    """Plan that knows which tokens of a pass follow which."""

    def earlier(self, layer: int, x: Tensor, count: int) -> list[Tensor]:
        """Return what x [T, D] was 1 to `count` tokens before each row in its sequence, [T, D]
        each, and zeros before a sequence's first token."""
        ...


class ExactShortConv(nn.Module):
    """A layer of one of CLASSES, with its parameters under their names. plan: that of the pass."""

    def __init__(self, layer: Any, plan: Callable[[], Any]):
        super().__init__()
        self.in_proj, self.conv, self.out_proj = layer.in_proj, layer.conv, layer.out_proj
        self.layer_idx, self._plan = layer.layer_idx, plan

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        """Map [1, T, D] to [1, T, D]. transformers calls it, with its own names."""
        before, after, x = self.in_proj(hidden_states[0]).chunk(3, -1)
        x, weight = before * x, self.conv.weight[:, 0].float()
        plan: History = self._plan()
        total = x.float() * weight[:, -1]
        for lag, earlier in enumerate(plan.earlier(self.layer_idx, x, weight.shape[1] - 1), 1):
            total = total + earlier.float() * weight[:, -1 - lag]
        if self.conv.bias is not None:
            total = total + self.conv.bias
        return self.out_proj(after * total.to(x.dtype))[None]  # type: ignore[no-any-return]


def put_short_convs(module: Any, plan: Callable[[], Any]) -> None:
    """Put exact short convolutions into a transformers module in place."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in CLASSES:
                setattr(parent, name, ExactShortConv(child, plan))
