"""The operators whose arithmetic depends on the device: oneDNN's products and torch's operators for
tensors on a CPU here, Triton's for those on a GPU in plugins/triton/plans.py.

registry.py names the kernels of a device, which are imported when a tensor first needs them.
Triton's launch on the thread's current GPU, so whoever asks makes the tensor's the current one.

Products run on a prepacked weight, which keeps an output row independent of the number of rows for
every count but one: with AVX-512 and more than 1,024 inputs a *single* row takes another kernel.
oneDNN compiles a kernel for every row count it meets, so counts are rounded up to few values
(`onednn.padded_rows`), at least 4: four rows are no slower than one. If oneDNN's operators are
missing, rows are padded to a multiple of 4 for plain `F.linear`; `probe` tells whether that is
exact on the machine at hand.

bfloat16: with AMX or AVX512_BF16 the product itself is in bfloat16, summed in float32, for
TILE_ROWS rows at a time, because other counts take other kernels. Where many rows at once give the
same bits, which is tried once for a shape, they are taken together. Any other CPU multiplies the
same numbers in float32 and rounds once. Attention is attention.py's and paged_attention.py's.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.model.attention import PackedPlan, Plan
from tandem.model.onednn import (
    HAS_PREPACKED,
    PACK_ROWS_HINT,
    TILE_ROWS,
    gradient_product,
    in_float32,
    padded_rows,
    tile_sizes,
    weight_gradient,
)
from tandem.model.paged_attention import DecodeRows, PagedPlan, Runs
from tandem.registry import built_in, find
from tandem.runtime.errors import UserError

CDF_BLOCK = 128  # tokens of the vocabulary, as inverse_cdf divides it

Rotation = tuple[Tensor, Tensor]  # cosine and signed sine, each [T, 1, E]


class Kernels:
    """The operators of a CPU; a subclass has those of another device. A row has the same bits
    beside any other rows."""

    # those of a linear, which the probe tries; the default comes first
    matmuls: Sequence[str] = ("plain",)
    own_matmuls: Sequence[str] = ("plain",)  # of one order of additions: the same bits
    chosen: str = "plain"  # the one that multiplies in this process
    fused: bool = False  # whether log-probs and their slopes are made of logits, without a table
    # what samples (tokens, log-probs) by logits of any type, temperature and uniforms without a
    # table, if anything; then slopes are of such logits and written over them
    draw: Callable[[Tensor, float, Tensor], tuple[Tensor, Tensor]] | None = None
    packs_stay: bool = False  # whether a pack is renewed where it is, for captured steps
    runs_ahead: bool = False  # whether decode steps may run ahead of the host (engine/lookahead.py)
    # rows of an output projection that the probe tries, (): all; here one costs as much as a layer
    head_rows: Sequence[int] = (4, 32)
    most_ranked: int = 4096  # tokens that the probe sorts: a CPU sorts a vocabulary for a second

    def on(self, device: torch.device) -> "Kernels":
        """Return the kernels for a device, which is the thread's current one from then on."""
        return self

    def use_matmul(self, kernel: str) -> None:
        """Multiply by one of `matmuls` from now on, as engine and trainer both must; on a CPU the
        name is that of all its kernels."""
        if kernel not in built_in("cpu_kernels"):
            return  # a trainer's on another kind of device
        if kernel not in self.matmuls:
            missing = f"the {kernel} kernels are not on this machine"
            raise UserError(missing, next="install a C++ compiler, then Tandem: pip builds them")
        in_use["cpu"] = find("cpu_kernels", kernel, key="the kernels of a CPU")

    def run_layers(
        self, model: Any, x: Tensor, rotation: "Rotation", plan: Plan, choices: Any
    ) -> Tensor:
        """Run the ExactLayers of a model without gradients, x [T', D] to [T', D]."""
        for layer in model.module.model.layers:
            x = layer(x, rotation, plan, choices)
        return x

    def count_rows(self, rows: int, plan: Plan, dtype: torch.dtype) -> int:
        """Return how many rows a pass over ExactLayers has, with its padding."""
        return padded_rows(rows, dtype)

    # ---- linears

    def pack(self, weight: Tensor) -> Tensor:
        """Reorder the weight [O, I] for `matmul`, if it wants another order."""
        weight = weight.detach().contiguous()
        if weight.dtype != torch.float32 and in_float32(weight):
            weight = weight.float()
        if not HAS_PREPACKED:
            return weight
        return torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS_HINT)

    def matmul(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [N, I] with a packed weight, without gradients, to [N, O]."""
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

    def time_ms(self, work: Callable[[], Any]) -> float:
        """Time some work as a decode step runs it, where there are several `matmuls`."""
        raise AssertionError("there is one kernel")

    def distinct(self, counts: Iterable[int], dtype: torch.dtype) -> list[int]:
        """List those of some row counts that are different products: here counts that round up to
        the same number are one."""
        if not HAS_PREPACKED:
            return list(counts)
        return sorted({padded_rows(rows, dtype): rows for rows in counts}.values())

    def gradient_product(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply a [N, K] with b [K, M] as onednn.gradient_product."""
        return gradient_product(a, b)

    def weight_gradient(self, above: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
        """Multiply above [N, O], transposed, with x [N, I] as onednn.weight_gradient."""
        return weight_gradient(above, x, total)

    # ---- attention

    def packed_plan(
        self, segments: np.ndarray, device: torch.device, heads: int, kv_heads: int
    ) -> Plan:
        """Plan the attention of packed segments, int64 [S, 4] as in types.Microbatch."""
        return PackedPlan(segments, group=heads // kv_heads, kv_heads=kv_heads)

    def paged_plan(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], runs: Runs, heads: int
    ) -> Plan:
        """Plan the attention of new tokens over a paged cache, as paged_attention.PagedPlan."""
        return PagedPlan(keys, values, runs, heads)

    def decode_plan(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], rows: DecodeRows, heads: int
    ) -> Plan:
        """Plan as `paged_plan` for a decode step over static tensors."""
        return self.paged_plan(keys, values, rows.runs(), heads)

    def shared_tiles(self, runs: Runs, heads: int, keys: Tensor) -> np.ndarray | None:
        """Plan which pages the sequences of a decode step read together, int32 [4, splits, S]; None
        if they share none, or if the plan sees to it. heads: of queries, keys: of a layer."""
        return None

    # ---- rows

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Compute the RMS norm of x [..., D], in float32."""
        if torch.is_grad_enabled():
            return _RMSNorm.apply(x, weight, epsilon, self)  # type: ignore[no-any-return]
        return self.norm(x, weight, epsilon)[0]

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Compute `rms_norm` without gradients, and what `norm_slope` takes of it."""
        wide = x.float()
        factors = wide.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        return (wide * factors).mul_(weight.float()).to(x.dtype), factors

    def norm_slope(
        self, x: Tensor, weight: Tensor, factors: Tensor, above: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute d loss / d x from that of the norm; and the weight's for each row, [..., D]."""
        above, scaled = above.float(), x.float() * factors
        slope = above * weight.float()
        mean = (slope * scaled).mean(-1, keepdim=True)
        slope.addcmul_(scaled, mean, value=-1).mul_(factors)
        return slope.to(x.dtype), above.mul(scaled)

    def add_rms_norm(
        self, x: Tensor, change: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Compute x + change and its RMS norm."""
        x = x + change
        return x, self.rms_norm(x, weight, epsilon)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Apply the rotary embedding to x [T, n, E]: the bits of x * cos + rotate_half(x) * sin."""
        cos, sin = rotation
        return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))

    def swiglu(self, x: Tensor) -> Tensor:
        """Compute silu(gate) * up [N, I] of x [N, 2I] = (gate, up), by `exp`, add, divide and
        multiply.

        torch's own silu computes the last few elements of a chunk with another exp, so its bits
        depend on how many elements there are and on the thread count (measured: 1 element in 25 of
        a short tail differs).
        """
        if torch.is_grad_enabled():
            return _SwiGLU.apply(x, self)  # type: ignore[no-any-return]
        return self.gated(x)

    def gated(self, x: Tensor) -> Tensor:
        """Compute `swiglu` without gradients."""
        gate, up = x.float().chunk(2, -1)
        inner = gate.neg().exp_().add_(1.0)
        return torch.div(gate, inner, out=inner).mul_(up).to(x.dtype)

    def gated_slope(self, x: Tensor, above: Tensor) -> Tensor:
        """Compute d loss / d x from that of `swiglu`."""
        kind, x, above = above.dtype, x.float(), above.float()
        (gate, up), grad = x.chunk(2, -1), torch.empty_like(x)
        # written in place: at few features this is memory traffic only
        grad_gate, grad_up = grad.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(
            torch.mul(above, up, out=grad_up), gate, grad_input=grad_gate
        )
        torch.mul(above, F.silu(gate), out=grad_up)
        return grad.to(kind)

    def rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Pick rows int64 [n] of x [T, D], one of them several times, with a gradient that is
        summed in a fixed order."""
        return x.index_select(0, rows)

    # ---- the vocabulary

    def log_softmax(self, logits: Tensor, temperature: float) -> Tensor:
        """Compute the log-probs [N, V] of tempered logits."""
        return (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)

    def top_p_edge(self, logprobs: Tensor, top_p: float) -> Tensor:
        """Find the smallest log-prob [N, 1] in the least set of likeliest tokens to reach top_p."""
        ranked = logprobs.sort(-1, descending=True).values
        probs = ranked.softmax(-1)
        before = probs.cumsum(-1) - probs
        return ranked.masked_fill(before >= top_p, float("inf")).amin(-1, keepdim=True)

    def likeliest(self, table: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Find the likeliest of log-probs [N, V]: theirs float32 [N, count], tokens int64."""
        return table.topk(count, -1)

    def inverse_cdf(self, table: Tensor, uniform: Tensor) -> Tensor:
        """Find tokens int64 [B] in log-probs [B, V], -inf where filtered, by uniform float32 [B] in
        [0, 1); they have positive probability.

        It searches in two levels, block of the vocabulary and token in it: one running sum over the
        vocabulary takes three times as long.
        """
        probs = F.pad(table.exp(), (0, -table.shape[1] % CDF_BLOCK)).view(len(table), -1, CDF_BLOCK)
        cdf = probs.sum(-1).cumsum(-1)
        block, rest = _search(cdf, uniform * cdf[:, -1])
        own = probs[torch.arange(len(table), device=table.device), block]
        token, _ = _search(own.cumsum(-1), rest)
        return block * CDF_BLOCK + token

    def target_logprobs(
        self, logits: Tensor, targets: Tensor, temperature: float, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute (log-probs of targets, entropies) [n] from logits [n, V], where `fused`."""
        raise AssertionError("not fused")

    def logprob_slope(
        self, logits: Tensor, targets: Tensor, temperature: float, *above: Tensor | None
    ) -> Tensor:
        """Compute d loss / d tempered logits [n, V] from logits, where `fused`; see `draw`. above:
        the gradients [n] of what `target_logprobs` gives."""
        raise AssertionError("not fused")


class _RMSNorm(torch.autograd.Function):
    """The autograd function of `rms_norm`: it keeps x and factors, not x times its factors too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, kernels: Kernels) -> Tensor:
        out, factors = kernels.norm(x, weight, epsilon)
        ctx.save_for_backward(x, weight, factors)
        ctx.kernels = kernels
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, each = ctx.kernels.norm_slope(*ctx.saved_tensors, grads[0])
        return grad, each.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kernels = kernels
        return kernels.gated(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.kernels.gated_slope(ctx.saved_tensors[0], grads[0]), None


def _search(cdf: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Find target [B] in cdf [B, n]: the first index with a greater cdf, int64 [B], and the
    distance into it [B]."""
    total = cdf[:, -1]
    # strictly below the total, so that the token found has positive probability
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cdf, target[:, None], right=True)
    before = F.pad(cdf, (1, 0)).gather(1, place)
    return place[:, 0], target - before[:, 0]


CPU = Kernels()
# Kernels in use by the type of a device, e.g. "cpu"
in_use: dict[str, Kernels] = {}


def kernels_of(t: Tensor) -> Kernels:
    """Return the kernels for a tensor's device, which is the thread's current one from then on."""
    kind = t.device.type
    if (found := in_use.get(kind)) is None:
        found = in_use[kind] = find("kernels", kind, key="model.device")
    return found.on(t.device)
