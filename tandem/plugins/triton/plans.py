"""The kernels of a GPU, with attention plans like `PackedPlan` and `PagedPlan` on the CPU.

Cache and shapes are the same, the arithmetic is another: engine and trainer agree with each other
to the bit, and with the CPU closely.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench_cudagraph

from tandem.model.attention import Plan, Scoring
from tandem.model.expert_choices import ExpertChoices
from tandem.model.kernels import Kernels, Rotation
from tandem.model.layers import ExactLayer, add_norm, norm
from tandem.model.linear import ExactLinear, FusedLinear, bias_of, packed_parts
from tandem.model.paged_attention import PAGE, DecodeRows, Runs
from tandem.plugins.triton import rowwise, vocabulary
from tandem.plugins.triton.attention import PagedRows, attention, tile_pairs, write_cache
from tandem.plugins.triton.matmul import matmul
from tandem.plugins.triton.packed_attention import PackedSegments, packed_attention
from tandem.plugins.triton.shared_splits import shared_attention, split_tiles


class TritonPackedPlan(PackedSegments):
    """Attention of packed segments, as in types.Microbatch, with a backward pass."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return packed_attention(q, k, v, self, scoring)


class TritonPagedPlan:
    """Attention over a paged cache; keys, values, runs and heads are as in PagedPlan."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], runs: Runs, heads: int):
        self.keys, self.values = keys, values
        device = keys[0].device

        def int32(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device)

        longest, decode = int((runs.starts + runs.counts).max()), bool((runs.counts == 1).all())
        self.rows = PagedRows(
            tables=int32(runs.table),
            first=int32(runs.firsts),
            count=int32(runs.counts),
            start=int32(runs.starts),
            max_length=longest,
            alone=decode,
        )
        self.slots = torch.from_numpy(runs.pages * PAGE + runs.offsets).to(device)
        tiles = TRITON.shared_tiles(runs, heads, keys[0]) if decode else None
        self.tiles: Tensor | None = None if tiles is None else int32(tiles)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        new = len(self.slots)
        write_cache(k[:new], v[:new], self.keys[layer], self.values[layer], self.slots)
        return self.attend_written(layer, q, scoring)

    def attend_written(self, layer: int, q: Tensor, scoring: Scoring) -> Tensor:
        """Attend with the rows' own keys and values in the cache already."""
        keys, values = self.keys[layer], self.values[layer]
        if self.tiles is not None:
            out = shared_attention(q, keys, values, self.rows, self.tiles, scoring)
            if out is not None:
                return out
        return attention(q, keys, values, self.rows, scoring)


class TritonDecodePlan(TritonPagedPlan):
    """Attention of a decode step, from tensors on the device alone: it can be captured in a graph
    that reads their later values."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], rows: DecodeRows):
        self.keys, self.values = keys, values
        self.rows = PagedRows(
            tables=rows.tables,
            first=torch.arange(len(rows.counts), dtype=torch.int32, device=rows.counts.device),
            count=rows.counts,
            start=rows.positions.to(torch.int32),
            max_length=rows.max_length,
            alone=True,
        )
        self.slots, self.tiles = rows.slots(), rows.tiles


def run_layer(
    layer: ExactLayer,
    x: Tensor,
    rotation: Rotation,
    plan: Plan,
    choices: ExpertChoices | None = None,
) -> Tensor:
    """Run a layer without gradients, with the bits of its `forward` and in eight launches over
    pages, if one of them attends."""
    attention = layer.self_attn
    heads = layer.qkv(norm(layer.input_layernorm, x))
    if isinstance(plan, TritonPagedPlan):
        heads = heads.view(len(x), -1, attention.head_dim)
        norms = [attention.q_norm, attention.k_norm] if layer.normed else []
        cache = plan.keys[layer.number], plan.values[layer.number]
        q = rowwise.turn_heads(heads, norms, rotation, *cache, plan.slots)
        out = plan.attend_written(layer.number, q, Scoring(attention.scaling, layer.window))
        change = attention.o_proj(out.view(len(x), -1))
    else:
        change = layer._attend(heads, rotation, plan)
    x, normed = add_norm(layer.post_attention_layernorm, x, change)
    if layer.gate_up is None:
        choose = None if choices is None else partial(choices.choose, layer.number)
        _, scores, chosen = layer.mlp.gate(normed, choose)
        return x + layer.mlp.experts(normed, chosen, scores)  # type: ignore[no-any-return]
    inner, down = _joined(layer.gate_up, layer.gate_up.parts, normed), layer.mlp.down_proj
    if down.in_parts:
        return x + down(inner)  # type: ignore[no-any-return]
    return _joined(down, [down], inner, x)


def _joined(
    owner: FusedLinear | ExactLinear,
    linears: Sequence[ExactLinear],
    x: Tensor,
    residual: Tensor | None = None,
) -> Tensor:
    """Run linears and add residual [N, O], or without one gate their output as `swiglu`: in one
    launch if the kernel is our own."""
    parts, packed = packed_parts(owner, linears)
    bias = bias_of(parts)
    if TRITON.chosen != "cublas":
        gated = residual is None
        return matmul(x, packed, bias, TRITON.chosen, residual=residual, gated=gated)
    made = F.linear(x, packed, bias)
    return TRITON.swiglu(made) if residual is None else residual + made


class TritonKernels(Kernels):
    own_matmuls = ("plain", "persistent", "tma")
    matmuls = (*own_matmuls, "cublas")
    fused = runs_ahead = packs_stay = True
    head_rows, most_ranked = (), 1 << 62  # all
    rms_norm, add_rms_norm = staticmethod(rowwise.rms_norm), staticmethod(rowwise.add_rms_norm)
    swiglu = staticmethod(rowwise.swiglu)
    log_softmax = staticmethod(vocabulary.log_softmax)
    draw, inverse_cdf = staticmethod(vocabulary.draw), staticmethod(vocabulary.inverse_cdf)
    target_logprobs = staticmethod(vocabulary.target_logprobs)
    logprob_slope = staticmethod(vocabulary.logprob_slope)

    def on(self, device: torch.device) -> "TritonKernels":
        if device.type == "cuda" and torch.cuda.current_device() != device.index:
            torch.cuda.set_device(device)
        return self

    def use_matmul(self, kernel: str) -> None:
        if kernel in self.matmuls:  # else of a trainer on a CPU
            self.chosen = kernel

    def run_layers(
        self, model: Any, x: Tensor, rotation: Rotation, plan: Plan, choices: Any
    ) -> Tensor:
        for layer in model.module.model.layers:
            x = run_layer(layer, x, rotation, plan, choices)
        return x

    def pack(self, weight: Tensor) -> Tensor:
        return weight.detach().contiguous()

    def matmul(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.chosen == "cublas":
            return F.linear(x, packed, bias)
        return matmul(x, packed, bias, self.chosen)

    def time_ms(self, work: Callable[[], Any]) -> float:
        return float(do_bench_cudagraph(work))

    def distinct(self, counts: Iterable[int], dtype: torch.dtype) -> list[int]:
        return list(counts)

    def packed_plan(
        self, segments: np.ndarray, device: torch.device, heads: int, kv_heads: int
    ) -> Plan:
        return TritonPackedPlan(segments, device)

    def paged_plan(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], runs: Runs, heads: int
    ) -> Plan:
        return TritonPagedPlan(keys, values, runs, heads)

    def decode_plan(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], rows: DecodeRows, heads: int
    ) -> Plan:
        return TritonDecodePlan(keys, values, rows)

    def shared_tiles(self, runs: Runs, heads: int, keys: Tensor) -> np.ndarray | None:
        most = tile_pairs(keys) // (heads // keys.shape[1])
        return split_tiles(runs.table, runs.starts, PAGE, most)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        return rowwise.rotate(x, *rotation)

    def rows(self, x: Tensor, rows: Tensor) -> Tensor:
        # index_select would sum gradients in no fixed order, the embedding sorts them
        return F.embedding(rows, x)

    def top_p_edge(self, logprobs: Tensor, top_p: float) -> Tensor:
        return vocabulary.top_p_edge(logprobs.sort(-1, descending=True).values, top_p)

    def likeliest(self, table: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Find the first of equal ones: `topk` takes kernels by the number of rows, which differ in
        that."""
        if not count:
            return table.topk(count, -1)
        values, tokens = table.sort(stable=True, dim=-1, descending=True)
        return values[:, :count], tokens[:, :count]


TRITON = TritonKernels()
