"""Frozen weights of linears in 4 or 8 bits, under adapters (QLoRA, Dettmers et al. 2023, arXiv
2305.14314).

nf4: 16 levels, the quantiles of a normal distribution, and a float32 scale for each 64 numbers in
row order, to the bits of bitsandbytes. int8: 255 even levels and a scale for each row. Each number
takes comparisons or one rounding, and a product, so any machine and any number of threads has the
same bits. This file knows no adapters and no layers.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

Base = Literal["nf4", "int8"]
BLOCK = 64  # numbers of nf4 that share a scale
NF4 = torch.tensor(  # Dettmers et al. 2023, appendix E
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
MIDDLES = (NF4[1:] + NF4[:-1]) / 2


class QuantizedWeight(Tensor):
    """A weight that keeps codes and scales, and is its dequantized numbers to whoever computes.

    Every operation but `detach` makes them anew and lets them go. It cannot be changed in place.
    """

    codes: Tensor  # uint8, two numbers of nf4 a byte; or int8 [O, I]
    scales: Tensor  # float32, one for each block of nf4; or [O, 1]

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, like: Tensor) -> "QuantizedWeight":
        made: QuantizedWeight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, dtype=like.dtype, device=codes.device
        )
        made.codes, made.scales = codes, scales
        return made

    def numbers(self) -> Tensor:
        """Compute the weight that the codes stand for, in its own type."""
        if self.codes.dtype == torch.int8:
            return (self.codes * self.scales).to(self.dtype)
        pairs = torch.cartesian_prod(NF4, NF4).to(self.device)  # of a byte, 8 bytes each
        chosen = pairs.view(torch.float64)[:, 0].index_select(0, self.codes.int())
        blocks = chosen.view(torch.float32).view(-1, BLOCK).mul_(self.scales[:, None])
        return blocks.view(-1)[: self.numel()].view(self.shape).to(self.dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scales, args[0])
        if func._schema.is_mutable and isinstance(args[0], cls):
            raise TypeError(f"{func} would change a quantized weight")
        args, kwargs = tree_map_only(cls, cls.numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


def quantize(weight: Tensor, base: Base) -> QuantizedWeight:
    """Quantize a weight [O, I], to the nearest level of each number."""
    exact = weight.detach().float()
    if base == "int8":
        largest = _positive(exact.abs().amax(1, keepdim=True))
        codes = (exact * (127 / largest)).round_().to(torch.int8)
        return QuantizedWeight(codes, largest / 127, weight)
    blocks = F.pad(exact.reshape(-1), (0, -exact.numel() % BLOCK)).view(-1, BLOCK)
    scales = _positive(blocks.abs().amax(1))
    blocks = blocks * (1 / scales[:, None])
    codes = torch.zeros_like(blocks, dtype=torch.uint8)
    for middle in MIDDLES.tolist():  # a third of the time of torch.bucketize
        codes += blocks > middle
    first, second = codes.view(-1, 2).unbind(1)
    return QuantizedWeight((first << 4) | second, scales, weight)


def _positive(largest: Tensor) -> Tensor:
    """Replace the zeros of numbers that are all zero."""
    return largest.where(largest > 0, 1.0)


def quantized_bytes(weight: Tensor, base: Base) -> int:
    """Return the bytes of codes and scales of a weight [O, I]."""
    if base == "int8":
        return weight.numel() + 4 * len(weight)
    return -(-weight.numel() // BLOCK) * (BLOCK // 2 + 4)
