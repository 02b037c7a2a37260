"""Kernels of a CPU: oneDNN's products, and torch's operators in orders that give a row the same
bits beside any other rows.

Products run on a prepacked weight, which keeps an output row independent of the number of rows for
every count but one: with AVX-512 and more than 1,024 inputs a *single* row takes another kernel.
oneDNN compiles a kernel for every row count it meets, so counts are rounded up to few values
(`onednn.padded_rows`), at least 4: four rows are no slower than one. If oneDNN's operators are
missing, rows are padded to a multiple of 4 for plain `F.linear`; `probe` tells whether that is
exact on the machine at hand.

bfloat16: with AMX the product itself is in bfloat16, summed in float32, for TILE_ROWS rows at a
time, because other counts take other kernels. Where many rows at once give the same bits, which is
tried once for a shape, they are taken together. Any other CPU multiplies the same numbers in
float32 and rounds the result once. Attention is attention.py's and paged_attention.py's.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.model.attention import PackedPlan, Plan
from tandem.model.kernels import Kernels, Rotation
from tandem.model.onednn import (
    HAS_PREPACKED,
    PACK_ROWS_HINT,
    TILE_ROWS,
    in_float32,
    padded_rows,
    tile_sizes,
)
from tandem.model.paged_attention import DecodeRows, PagedPlan, Runs

CDF_BLOCK = 128  # tokens of the vocabulary, as inverse_cdf divides it


class CpuKernels(Kernels):
    head_rows = (4, 32)  # one costs as much as a layer
    most_ranked = 4096  # a CPU sorts a whole vocabulary for a second

    def on(self, device: torch.device) -> "CpuKernels":
        return self

    def pack(self, weight: Tensor) -> Tensor:
        weight = weight.detach().contiguous()
        if weight.dtype != torch.float32 and in_float32(weight):
            weight = weight.float()
        if not HAS_PREPACKED:
            return weight
        return torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS_HINT)

    def matmul(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype != torch.float32 and in_float32(x):
            bias = None if bias is None else bias.float()
            return self.matmul(x.float(), packed, bias).to(x.dtype)
        rows = x.shape[0]
        if not HAS_PREPACKED:
            return F.linear(F.pad(x, (0, 0, 0, -rows % 4)), packed, bias)[:rows]
        padded, run = padded_rows(rows, x.dtype), torch.ops.mkldnn._linear_pointwise
        if padded != rows:
            x = F.pad(x, (0, 0, 0, padded - rows))
        if x.dtype == torch.float32 or padded <= TILE_ROWS:
            out = run(x, packed, bias, "none", [], "")
        else:
            sizes = tile_sizes(padded, packed.shape[1], packed.shape[0], torch.get_num_threads())
            out = torch.cat([run(part, packed, bias, "none", [], "") for part in x.split(sizes)])
        return out if padded == rows else out[:rows]  # a module may write into what is no view

    def packed_plan(
        self, segments: np.ndarray, device: torch.device, heads: int, kv_heads: int
    ) -> Plan:
        return PackedPlan(segments, group=heads // kv_heads, kv_heads=kv_heads)

    def paged_plan(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], runs: Runs, heads: int
    ) -> Plan:
        return PagedPlan(keys, values, runs, heads)

    def decode_plan(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], rows: DecodeRows, heads: int
    ) -> Plan:
        return PagedPlan(keys, values, rows.runs(), heads)

    def shared_tiles(self, runs: Runs, group: int) -> np.ndarray | None:
        return None  # the plan sees to it

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        if torch.is_grad_enabled():
            return _RMSNorm.apply(x, weight, epsilon)  # type: ignore[no-any-return]
        return _rms_norm(x, weight, epsilon)[0]

    def add_rms_norm(
        self, x: Tensor, change: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        x = x + change
        return x, self.rms_norm(x, weight, epsilon)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        cos, sin = rotation
        return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))

    def swiglu(self, x: Tensor) -> Tensor:
        """Compute by `exp`, add, divide and multiply.

        torch's own silu computes the last few elements of a chunk with another exp, so its bits
        depend on how many elements there are and on the thread count (measured: 1 element in 25 of
        a short tail differs).
        """
        return _SwiGLU.apply(x) if torch.is_grad_enabled() else _swiglu(x)  # type: ignore[no-any-return]

    def log_softmax(self, logits: Tensor, temperature: float) -> Tensor:
        return (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)

    def top_p_edge(self, logprobs: Tensor, top_p: float) -> Tensor:
        ranked = logprobs.sort(-1, descending=True).values
        probs = ranked.softmax(-1)
        before = probs.cumsum(-1) - probs
        return ranked.masked_fill(before >= top_p, float("inf")).amin(-1, keepdim=True)

    def likeliest(self, table: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return table.topk(count, -1)

    def inverse_cdf(self, table: Tensor, uniform: Tensor) -> Tensor:
        """Search in two levels, block of the vocabulary and token in it: one running sum over the
        vocabulary takes three times as long."""
        probs = F.pad(table.exp(), (0, -table.shape[1] % CDF_BLOCK)).view(len(table), -1, CDF_BLOCK)
        cdf = probs.sum(-1).cumsum(-1)
        block, rest = _search(cdf, uniform * cdf[:, -1])
        own = probs[torch.arange(len(table), device=table.device), block]
        token, _ = _search(own.cumsum(-1), rest)
        return block * CDF_BLOCK + token

    def rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def distinct(self, counts: Iterable[int], dtype: torch.dtype) -> list[int]:
        """Leave out row counts that round up to the same number: they are the same product."""
        if not HAS_PREPACKED:
            return list(counts)
        return sorted({padded_rows(rows, dtype): rows for rows in counts}.values())


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x and its factors, float32 [..., 1]."""
    wide = x.float()
    factors = wide.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    return (wide * factors).mul_(weight.float()).to(x.dtype), factors


class _RMSNorm(torch.autograd.Function):
    """The autograd function of `norm`: it keeps x and factors, not x times its factors too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out, factors = _rms_norm(x, weight, epsilon)
        ctx.save_for_backward(x, weight, factors)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, factors = ctx.saved_tensors
        above, scaled = grads[0].float(), x.float() * factors
        grad_weight = (above * scaled).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        slope = above * weight.float()
        mean = (slope * scaled).mean(-1, keepdim=True)
        return slope.addcmul_(scaled, mean, value=-1).mul_(factors).to(x.dtype), grad_weight, None


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    inner = gate.neg().exp_().add_(1.0)
    return torch.div(gate, inner, out=inner).mul_(up).to(x.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _swiglu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, above = ctx.saved_tensors[0].float(), grads[0].float()
        (gate, up), grad = x.chunk(2, -1), torch.empty_like(x)
        # written in place: at few features this is memory traffic only
        grad_gate, grad_up = grad.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(
            torch.mul(above, up, out=grad_up), gate, grad_input=grad_gate
        )
        torch.mul(above, F.silu(gate), out=grad_up)
        return grad.to(grads[0].dtype)


def _search(cdf: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Find target [B] in cdf [B, n]: the first index with a greater cdf, int64 [B], and the
    distance into it [B]."""
    total = cdf[:, -1]
    # strictly below the total, so that the token found has positive probability
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cdf, target[:, None], right=True)
    before = F.pad(cdf, (1, 0)).gather(1, place)
    return place[:, 0], target - before[:, 0]


CPU = CpuKernels()
