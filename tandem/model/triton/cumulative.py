"""Running sums of probabilities on tensors: they launch the kernels for tokens and top-p.

A row [V] of log-probs needs no normalization: sums count as shares of the whole row's. This file
knows no filters.
"""

import torch
import triton
from torch import Tensor

from tandem.model.triton.cumulative_kernels import inverse_cdf_kernel, top_p_edge_kernel

BLOCK = 4096


def inverse_cdf(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Find the tokens int64 [N] of uniform float32 [N] in [0, 1) in log-probs float32 [N, V]."""
    logprobs = _dense(logprobs)
    tokens = torch.empty(len(logprobs), dtype=torch.int64, device=logprobs.device)
    inverse_cdf_kernel[(len(logprobs),)](
        logprobs, uniform.contiguous(), tokens, logprobs.shape[1], **_tile(logprobs)
    )
    return tokens


def top_p_edge(ranked: Tensor, top_p: float) -> Tensor:
    """Find the smallest log-prob [N, 1] in the least set of likeliest tokens that reaches top_p.

    ranked: log-probs float32 [N, V], descending.
    """
    ranked = _dense(ranked)
    edges = ranked.new_empty(len(ranked), 1)
    top_p_edge_kernel[(len(ranked),)](ranked, edges, ranked.shape[1], top_p, **_tile(ranked))
    return edges


def _dense(rows: Tensor) -> Tensor:
    """Copy rows unless they are dense and begin at a multiple of 16 bytes: Triton orders a sum by
    the alignment that it knows."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows


def _tile(rows: Tensor) -> dict[str, int]:
    """Choose the blocks by the vocabulary alone."""
    size = rows.shape[1]
    block = min(BLOCK, triton.next_power_of_2(size))
    count = triton.next_power_of_2(triton.cdiv(size, block))
    return {"BLOCK": block, "BLOCKS": count, "num_warps": 8}
