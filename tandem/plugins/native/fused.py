"""The compiled kernels as the Kernels of a model.

Norm, rotation, SwiGLU, attention and the vocabulary are float32 inside, and round once to the
model's type. Linears of bfloat16 run in AMX or AVX512_BF16 if the CPU has one, gradients in oneDNN.
"""

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tandem.model.attention import PackedPlan, Plan, Scoring
from tandem.model.kernels import CPU as PLAIN
from tandem.model.kernels import Kernels, Rotation
from tandem.model.layers import ExactLayer
from tandem.model.linear import PackedWeight, bias_of, packed_parts
from tandem.model.onednn import bfloat16_unit, in_float32
from tandem.model.paged_attention import PagedPlan, Runs
from tandem.plugins.native.library import Library, load

PANEL, TILES, LANES = 64, 32, 16  # as in kernels.cpp and tiles.h


class FusedKernels(Kernels):
    """The kernels of a CPU by a library."""

    matmuls, chosen, fused = ("fused", "plain"), "fused", True

    def __init__(self, library: Library):
        self._run, self._place = library.run, library.place
        unit = bfloat16_unit()
        self._unit = unit if library.place(f"linear_{unit}.bfloat16") else ""
        self._tables: Any = WeakKeyDictionary()  # of models
        PLAIN.matmuls = self.matmuls  # from now on there is a choice

    # ---- linears

    def pack(self, weight: Tensor) -> Tensor:
        weight = weight.detach().contiguous()
        (outputs, inputs), tiles = weight.shape, self._in_tiles(weight)
        panel, terms = (TILES, TILES) if tiles else (PANEL, 1)
        packed = weight.new_empty(outputs + -outputs % panel, inputs + -inputs % terms)
        self._run("pack_tiles" if tiles else "pack", weight, weight, outputs, inputs, packed)
        return packed[:outputs]  # its memory is in panels

    def _in_tiles(self, t: Tensor) -> bool:
        """Tell whether products with t run in a unit for bfloat16, whose packs are tiles."""
        return t.dtype != torch.float32 and bool(self._unit)

    def matmul(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        if packed.is_mkldnn:
            return super().matmul(x, packed, bias)
        if x.dtype != packed.dtype:
            return self.matmul(x.to(packed.dtype), packed, bias).to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype).contiguous()
        x, outputs = x.contiguous(), len(packed)
        out = x.new_empty(len(x), outputs)
        self._run(self._linear(packed), x, x, *x.shape, packed, outputs, bias, out)
        return out

    def _linear(self, packed: Tensor) -> str:
        return f"linear_{self._unit}" if self._in_tiles(packed) else "linear"

    def gradient_product(self, a: Tensor, b: Tensor) -> Tensor:
        if b.dtype != torch.float32 and not in_float32(b):
            return super().gradient_product(a, b)
        numbers = getattr(b, "numbers", None)  # of a QuantizedWeight
        return self._multiply(a.float(), b.float() if numbers is None else numbers().float())

    def weight_gradient(self, above: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
        if x.dtype != torch.float32 and not in_float32(x):
            return super().weight_gradient(above, x, total)
        return self._multiply(above.float().t(), x.float(), total)

    def _multiply(self, a: Tensor, b: Tensor, total: Tensor | None = None) -> Tensor:
        """Multiply a [M, K] with b [K, N], and add that to total [M, N] if it is given."""
        b = b if b.stride(1) == 1 else b.contiguous()
        if total is not None and (total.dtype != torch.float32 or not total.is_contiguous()):
            return total.add_(self._multiply(a, b))
        make = a.new_empty if a.shape[1] else a.new_zeros  # of no terms the kernel writes nothing
        out = make(len(a), b.shape[1]) if total is None else total
        sides = a, *a.stride(), *a.shape, b, b.stride(0), b.shape[1]
        self._run("multiply", None, *sides, out, int(total is not None))
        return out

    def distinct(self, counts: Iterable[int], dtype: torch.dtype) -> list[int]:
        return list(counts)

    # ---- attention

    def packed_plan(
        self, segments: np.ndarray, device: torch.device, heads: int, kv_heads: int
    ) -> Plan:
        return FusedPackedPlan(segments, heads, kv_heads, self)

    def paged_plan(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], runs: Runs, heads: int
    ) -> Plan:
        size = next(k.shape[3] for k, v in zip(keys, values, strict=True) if len(v))
        if size % LANES:
            return super().paged_plan(keys, values, runs, heads)
        return FusedPagedPlan(keys, values, runs, heads, self)

    # ---- layers

    def count_rows(self, rows: int, plan: Plan, dtype: torch.dtype) -> int:
        return rows if isinstance(plan, FusedPagedPlan) else super().count_rows(rows, plan, dtype)

    def run_layers(
        self, model: Any, x: Tensor, rotation: Rotation, plan: Plan, choices: Any
    ) -> Tensor:
        fits = isinstance(plan, FusedPagedPlan) and plan.fits(x)
        table = self._table_of(model, x.dtype) if fits else None
        if table is None:
            return super().run_layers(model, x, rotation, plan, choices)
        assert isinstance(plan, FusedPagedPlan)
        (first, *_), (rows, width) = model.module.model.layers, x.shape
        (heads, kv_heads, size), inner = model.heads, first.mlp.down_proj.weight.shape[1]
        widest = max(3 * inner, 3 * (heads + kv_heads) * size)
        work, out = x.new_empty(rows * (2 * width + widest)), x.new_empty(x.shape)
        turns = [side.to(x.dtype).contiguous() for side in rotation]
        linear = self._place(f"{self._linear(x)}.{str(x.dtype).removeprefix('torch.')}")
        sizes = rows, width, inner, table, len(table)
        norms = float(first.input_layernorm.variance_epsilon), *turns, plan.addresses
        of_heads = *plan.places, heads, kv_heads, size, float(first.self_attn.scaling)
        self._run("layers", x, x.contiguous(), *sizes, *norms, *of_heads, linear, work, out)
        return out

    def _table_of(self, model: Any, dtype: torch.dtype) -> Tensor | None:
        """Return the addresses of each layer's parts, int64 [L, 13]; None if the kernel cannot run
        one."""
        found, key = self._tables.get(model), (PackedWeight.moves, model.changes())
        if found is None or found[0] != key:
            rows = [_parts_of(layer, dtype) for layer in model.module.model.layers]
            numbers = [[t.data_ptr() if isinstance(t, Tensor) else t or 0 for t in r] for r in rows]
            # the packs, which are large, are not kept alive
            held = [part.detach() for row in rows for part in row[:8] if isinstance(part, Tensor)]
            table = torch.tensor(numbers) if all(rows) else None
            # if packs were made just now, the next call looks again
            found = self._tables[model] = key, table, held
        return found[1]  # type: ignore[no-any-return]

    # ---- rows

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        if weight.dtype != x.dtype:
            return super().norm(x, weight, epsilon)
        x = x.contiguous()
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        out, factors = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
        self._run("rms_norm", x, x, None, weight, epsilon, rows, width, None, out, factors)
        return out, factors

    def norm_slope(
        self, x: Tensor, weight: Tensor, factors: Tensor, above: Tensor
    ) -> tuple[Tensor, Tensor]:
        if weight.dtype != x.dtype:
            return super().norm_slope(x, weight, factors, above)
        x, above, width = x.contiguous(), above.contiguous(), x.shape[-1]
        grad, scaled = torch.empty_like(x), x.new_empty(len(factors), width, dtype=torch.float32)
        sides = x, weight, factors, above, len(factors), width, grad, scaled
        self._run("rms_norm_backward", x, *sides)
        return grad, scaled

    def add_rms_norm(
        self, x: Tensor, change: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() or not x.dtype == weight.dtype == change.dtype:
            return super().add_rms_norm(x, change, weight, epsilon)
        x, change = x.contiguous(), change.contiguous()
        total, out = torch.empty_like(x), torch.empty_like(x)
        sizes = x.numel() // x.shape[-1], x.shape[-1]
        self._run("rms_norm", x, x, change, weight, epsilon, *sizes, total, out, None)
        return total, out

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        if torch.is_grad_enabled():
            return _Rotate.apply(x, *rotation, self)  # type: ignore[no-any-return]
        return self.turn(x, *rotation, 1.0)

    def turn(self, x: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
        """Rotate x [T, n, E], by the negative angle for sign -1."""
        x = _by_rows(x)
        out = x.new_empty(x.shape)
        sides = cosine.to(x.dtype).contiguous(), sine.to(x.dtype).contiguous()
        self._run("rotate", x, x, x.stride(0), *sides, sign, *x.shape, out)
        return out

    def gated(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(len(x), x.shape[1] // 2)
        self._run("swiglu", x, x, *out.shape, out)
        return out

    def gated_slope(self, x: Tensor, above: Tensor) -> Tensor:
        x, above = x.contiguous(), above.contiguous()
        grad = torch.empty_like(x)
        self._run("swiglu_backward", x, x, above, *above.shape, grad)
        return grad

    # ---- the vocabulary

    def log_softmax(self, logits: Tensor, temperature: float) -> Tensor:
        logits = logits.contiguous()
        out = torch.empty_like(logits)
        self._run("log_softmax", None, logits, *logits.shape, float(temperature), out)
        return out

    def inverse_cdf(self, table: Tensor, uniform: Tensor) -> Tensor:
        table, uniform = table.contiguous(), uniform.contiguous()
        tokens = torch.empty(len(table), dtype=torch.int64)
        self._run("inverse_cdf", None, table, uniform, *table.shape, tokens)
        return tokens

    def target_logprobs(
        self, logits: Tensor, targets: Tensor, temperature: float, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits, targets = logits.contiguous(), targets.long().contiguous()
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[1]:
            raise IndexError("a target is not in the vocabulary")
        found = logits.new_empty(len(logits))
        entropies = torch.empty_like(found) if entropy else None
        sizes = *logits.shape, float(temperature)
        self._run("target_logprobs", None, logits, targets, *sizes, found, entropies)
        return found, entropies

    def logprob_slope(
        self, logits: Tensor, targets: Tensor, temperature: float, *above: Tensor | None
    ) -> Tensor:
        given = (None if grad is None else grad.contiguous() for grad in above)
        sizes = *logits.shape, float(temperature)
        self._run("logprob_slope", None, logits, targets.long().contiguous(), *sizes, *given)
        return logits


def _parts_of(layer: ExactLayer, dtype: torch.dtype) -> list[Tensor | int | None]:
    """List what the kernel `layers` takes of a layer, the window last; empty if it cannot run."""
    attention, gate_up = layer.self_attn, layer.gate_up
    if gate_up is None or attention.o_proj.in_parts or layer.mlp.down_proj.in_parts:
        return []
    runs: list[Any] = [(one, one.parts) for one in (layer.qkv, gate_up)]
    runs += [(one, [one]) for one in (attention.o_proj, layer.mlp.down_proj)]
    if not all(pack.kept for owner, _ in runs for pack in owner.packs()):
        return []
    used = [packed_parts(*one) for one in runs]
    norms = [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
    own = [attention.q_norm.weight, attention.k_norm.weight] if layer.normed else [None, None]
    biases, packs = [bias_of(parts) for parts, _ in used], [packed for _, packed in used]
    tensors = [*biases, *norms, *own, *packs]
    is_other = any(t.dtype != dtype or t.is_mkldnn for t in tensors if t is not None)
    return [] if is_other else [*tensors, layer.window or 0]


def _by_rows(x: Tensor) -> Tensor:
    """Return x [T, n, E] itself if only its rows may be apart, else a copy."""
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if dense else x.contiguous()


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, kernels: FusedKernels) -> Tensor:
        ctx.rotation, ctx.kernels = (cosine, sine), kernels
        return kernels.turn(x, cosine, sine, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.kernels.turn(grads[0], *ctx.rotation, -1.0), None, None, None


def _scoring(scoring: Scoring) -> tuple[float, float, int]:
    """Return scale, soft cap and window, 0 for none, as the kernels take them."""
    return float(scoring.scale), float(scoring.softcap), scoring.window or 0


def _sides(*sides: Tensor) -> list[Any]:
    """Return each tensor [T, n, E] with the numbers between its rows."""
    return [part for side in map(_by_rows, sides) for part in (side, side.stride(0))]


class FusedPackedPlan(PackedPlan):
    """Attention of packed segments, as in types.Microbatch, with a backward pass."""

    def __init__(self, segments: np.ndarray, heads: int, kv_heads: int, kernels: FusedKernels):
        super().__init__(segments, group=heads // kv_heads, kv_heads=kv_heads)
        self.segments, self.kernels = torch.from_numpy(np.ascontiguousarray(segments)), kernels

    @cached_property
    def groups(self) -> Tensor:
        """Find where each group of segments that share keys begins, and where the last one ends,
        int64 [G + 1]; segments are in the order of their rows."""
        first, _, prefix_first, prefix = self.segments.numpy().T
        owner = np.searchsorted(first, np.where(prefix > 0, prefix_first, first), side="right") - 1
        # a group ends where no later segment reaches back over the place
        reach = np.minimum.accumulate(owner[::-1])[::-1]
        starts = np.flatnonzero(reach == np.arange(len(reach)))
        return torch.from_numpy(np.append(starts, len(reach)))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor | None]:
        """Return logarithms of the sums of exponentials, float32 [T, H], beside the output."""
        if q.shape[2] % LANES:
            return super().forward(q, k, v, scoring)
        (_, heads, size), kv_heads = q.shape, k.shape[1]
        out, lse = q.new_zeros(q.shape), q.new_zeros(q.shape[:2], dtype=torch.float32)
        sinks = None if scoring.sinks is None else scoring.sinks.detach().float()
        sizes = self.segments, len(self.segments), heads, kv_heads, size
        sides = _sides(q, k.to(q.dtype), v.to(q.dtype))
        self.kernels._run("packed", q, *sides, *sizes, *_scoring(scoring), sinks, out, lse)
        return out, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, above: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        if kept is None:
            return super().backward(q, k, v, scoring, above, kept)
        made = [torch.zeros(side.shape) for side in (q, k, v)]
        lost, groups = torch.zeros(q.shape[:2]), self.groups
        sizes = self.segments, groups, len(groups) - 1, q.shape[1], k.shape[1], q.shape[2]
        sides = _sides(q, k.to(q.dtype), v.to(q.dtype))
        given = *sides, above.to(q.dtype).contiguous(), kept, *sizes, *_scoring(scoring)
        self.kernels._run("packed_backward", q, *given, *made, lost)
        of_sinks = None
        if scoring.sinks is not None:  # each has the rest of a row's probability
            padding = torch.ones(len(q), 1, dtype=torch.bool)
            for first, rows, *_ in self.segments.tolist():
                padding[first : first + rows] = False
            rest = (scoring.sinks.float() - kept).masked_fill_(padding, float("-inf")).exp_()
            of_sinks = -(rest * lost).sum(0).to(scoring.sinks.dtype)
        grad_q, grad_k, grad_v = (grad.to(q.dtype) for grad in made)
        return grad_q, grad_k, grad_v, of_sinks


class FusedPagedPlan(PagedPlan):
    """Attention over a paged cache, whose pages of keys are by element: [E, PAGE]."""

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        runs: Runs,
        heads: int,
        kernels: FusedKernels,
    ):
        self.keys, self.values, self._runs, self._kernels = keys, values, runs, kernels
        self.new, self._slots = len(runs.pages), []
        table, *each = (
            torch.from_numpy(np.ascontiguousarray(part))
            for part in (runs.table, runs.starts, runs.counts, runs.firsts)
        )
        self.places = table, table.shape[1], *each, len(runs.counts)

    def fits(self, x: Tensor) -> bool:
        """Tell whether the rows of x are those of the plan, and its type that of the cache."""
        return len(x) == self.new and x.dtype == self.keys[0].dtype

    @cached_property
    def addresses(self) -> Tensor:
        """Return those of keys and values by layer, int64 [L, 2]."""
        pairs = zip(self.keys, self.values, strict=True)
        return torch.tensor([(keys.data_ptr(), values.data_ptr()) for keys, values in pairs])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        keys, values, heads = self.keys[layer], self.values[layer], q.shape[1]
        if q.dtype != keys.dtype:
            kind = keys.dtype
            return self.attend(layer, q.to(kind), k.to(kind), v.to(kind), scoring).to(q.dtype)
        out = q.new_empty(q.shape) if len(q) == self.new else q.new_zeros(q.shape)
        sinks = None if scoring.sinks is None else scoring.sinks.detach().float()
        sizes = *self.places, heads, keys.shape[1], q.shape[2], *_scoring(scoring)
        self._kernels._run("paged", q, *_sides(q, k, v), keys, values, *sizes, sinks, out)
        return out


_library = None if os.environ.get("TANDEM_KERNELS") == "plain" else load()
CPU: Kernels = PLAIN if _library is None else FusedKernels(_library)
