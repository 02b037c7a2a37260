"""The operators of the GPU path: attention plans like `PackedPlan` and `PagedPlan` on the CPU, and
by their names those of linear, layers and log-probs.

Cache and shapes are the same, the arithmetic is another: engine and trainer agree with each other
to the bit, and with the CPU closely.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench_cudagraph as do_bench_cudagraph

from tandem.model.paged_attention import PAGE, DecodeRows, Runs
from tandem.model.triton import ops
from tandem.model.triton.cumulative import inverse_cdf as inverse_cdf
from tandem.model.triton.cumulative import top_p_edge as top_p_edge
from tandem.model.triton.dispatch import matmul_kernel
from tandem.model.triton.ops import PagedRows, attention, write_cache
from tandem.model.triton.packed_attention import PackedSegments, packed_attention
from tandem.model.triton.rowwise import add_rms_norm as add_rms_norm
from tandem.model.triton.rowwise import rms_norm as rms_norm
from tandem.model.triton.rowwise import rotate as rotate
from tandem.model.triton.rowwise import swiglu as swiglu
from tandem.model.triton.shared_splits import shared_attention, split_tiles
from tandem.model.triton.vocabulary import log_softmax as log_softmax
from tandem.model.triton.vocabulary import logprob_slope as logprob_slope
from tandem.model.triton.vocabulary import target_logprobs as target_logprobs

# Candidates for a linear, which the probe tries (probe.py); the default comes first.
OWN_MATMULS = ("plain", "persistent", "tma")  # of one order of additions: the same bits
MATMULS = (*OWN_MATMULS, "cublas")


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as `ops.matmul` by the kernel that this process uses."""
    kernel = matmul_kernel()
    return F.linear(x, weight, bias) if kernel == "cublas" else ops.matmul(x, weight, bias, kernel)


class TritonPackedPlan:
    """Attention of packed segments, as in types.Microbatch, with a backward pass."""

    def __init__(self, segments: np.ndarray, device: torch.device):
        self.segments = PackedSegments(segments, device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        return packed_attention(q, k, v, self.segments, scale, window)


class TritonPagedPlan:
    """Attention over a paged cache; keys, values, runs and heads are as in PagedPlan."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], runs: Runs, heads: int):
        self.keys, self.values = keys, values
        device = keys[0].device

        def int32(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device)

        longest = int((runs.starts + runs.counts).max())
        self.rows = PagedRows(
            tables=int32(runs.table),
            first=int32(runs.firsts),
            count=int32(runs.counts),
            start=int32(runs.starts),
            max_length=longest,
        )
        self.slots = torch.from_numpy(runs.pages * PAGE + runs.offsets).to(device)
        decode = (runs.counts == 1).all()
        group = heads // keys[0].shape[1]
        tiles = split_tiles(runs.table, runs.starts, PAGE, group) if decode else None
        self.tiles: Tensor | None = None if tiles is None else int32(tiles)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        keys, values, new = self.keys[layer], self.values[layer], len(self.slots)
        write_cache(k[:new], v[:new], keys, values, self.slots)
        if self.tiles is not None:
            out = shared_attention(q, keys, values, self.rows, self.tiles, scale, window)
            if out is not None:
                return out
        return attention(q, keys, values, self.rows, scale, window)


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
        )
        self.slots, self.tiles = rows.slots(), rows.tiles
