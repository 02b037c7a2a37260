"""Matmul, attention and cache writes on tensors, without gradients: they launch the kernels.

E, the head size, must be the contiguous dimension of every tensor. The kernels run on the current
CUDA device, or on the CPU in Triton's interpreter if TRITON_INTERPRET=1 was set before triton was
imported. This file knows no layers, plans, sampling or gradients. Checked by `pytest tests/gpu`.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from tandem.model.triton.attention_kernels import (
    BLOCK_KEYS,
    BLOCK_Q,
    SPLIT_KEYS,
    attend_kernel,
    merge_kernel,
    write_kernel,
)
from tandem.model.triton.matmul_kernels import MATMUL_TILE, matmul_kernel, persistent_matmul_kernel

# Partial results of one attention call; beyond it one program walks all splits of a tile.
SCRATCH_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedRows:
    """The rows of q of each sequence, and the pages of its keys.

    Sequence s has count[s] new tokens. Token i is in row first[s] + i of q, at position
    start[s] + i, and sees the keys 0 .. start[s] + i, its own included, which the cache holds
    already. A count of 0 marks an unused place, whose other fields are not read.

    Two sequences over pages of 128 tokens, one with 130 tokens that decodes, one prefilling its
    first three: PagedRows(tables=[[7, 2], [4, 0]], first=[0, 1], count=[1, 3], start=[129, 0],
    max_length=256)
    """

    # int32 [S, M], page numbers of each sequence in order; those beyond its last key are not read
    tables: Tensor
    first: Tensor  # int32 [S]
    count: Tensor  # int32 [S]
    start: Tensor  # int32 [S]
    # at least every start + count; it sets the number of splits launched, never a result
    max_length: int


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, kernel: str = "plain") -> Tensor:
    """Multiply x [N, I] with weight [O, I], plus bias [O], to [N, O] of their common dtype.

    Sums are float32. Every kernel sums the same tiles in the same order. "persistent" starts one
    program for each multiprocessor; "tma" does too, and reads through tensor descriptors where
    addresses and row strides are multiples of 16 bytes.
    """
    _need_contiguous_rows(x, weight)
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = x.new_empty(rows, outputs)
    row_tiles = triton.cdiv(rows, MATMUL_TILE.value)
    output_tiles = triton.cdiv(outputs, MATMUL_TILE.value)
    arguments = x, weight, bias, out, rows, outputs, inputs, x.stride(0), weight.stride(0)
    options = {"num_warps": 4, "num_stages": 3}
    if kernel == "plain":
        matmul_kernel[output_tiles, row_tiles](*arguments, **options)
        return out
    if tma := kernel == "tma" and _aligned_rows(x, weight):
        triton.set_allocator(partial(_descriptor_memory, x.device))
    programs = min(_processors(x.device), row_tiles * output_tiles)
    persistent_matmul_kernel[(programs,)](*arguments, TMA=tma, **options)
    return out


def _processors(device: torch.device) -> int:
    """Count the multiprocessors of a GPU; 3 in the interpreter, so that a program walks tiles."""
    if device.type == "cpu":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def _descriptor_memory(
    device: torch.device, size: int, alignment: int, stream: int | None
) -> Tensor:
    """Allocate the device memory that a kernel writes its tensor descriptors to."""
    return torch.empty(size, dtype=torch.int8, device=device)


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    scale: float,
    window: int | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Tensor:
    """Attend q [T, H, E] over keys and values [P, K, PAGE, E], PAGE a multiple of 64, to [T, H, E].

    Rows of no sequence are zero. With a window w a token sees itself and the w - 1 before it.
    scratch_bytes bounds the partial results of splits that run beside each other; it changes time
    and memory, never a bit. The launch depends on shapes and on max_length only, so it can be
    captured in a CUDA graph.
    """
    if keys.shape[2] % BLOCK_KEYS.value:
        raise ValueError(
            f"a page holds {keys.shape[2]} tokens, expected a multiple of {BLOCK_KEYS.value}"
        )
    return _attend(q, keys, values, rows, True, scale, window, scratch_bytes)


def segment_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    segments: Tensor,
    scale: float,
    window: int | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    lse: Tensor | None = None,
) -> Tensor:
    """Attend packed rows: q [T, H, E] over keys and values [T, K, E], to [T, H, E].

    Rows of no segment are zero. segments int [S, 4] holds (first row, rows, first row of the
    prefix, rows of the prefix): token i of a segment stands at position prefix + i and sees the
    prefix and the segment's rows up to its own. lse, if given, is filled: float32 [T, H], the
    base-2 log-sum-exp of a query's scores; that of rows of no segment is undefined.
    """
    first, count, prefix_first, prefix = segments.to(q.device, torch.int32).t().contiguous()
    rows = PagedRows(
        tables=prefix_first[:, None], first=first, count=count, start=prefix, max_length=len(q)
    )
    keys, values = (t.transpose(0, 1)[None] for t in (keys, values))  # one page [1, K, T, E]
    return _attend(q, keys, values, rows, False, scale, window, scratch_bytes, lse)


def write_cache(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Copy k and v [T, K, E] into pages [P, K, PAGE, E] in place.

    slots int64 [T] are page * PAGE + offset, or -1 for a row to skip.
    """
    _need_contiguous_rows(k, v, keys, values)
    _, heads, width = k.shape
    write_kernel[(len(k),)](
        k,
        v,
        keys,
        values,
        slots,
        *k.stride()[:2],
        *v.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        PAGE=keys.shape[2],
        HEADS=heads,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(heads * width),
        num_warps=4,
    )


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    paged: bool,
    scale: float,
    window: int | None,
    scratch_bytes: int,
    lse: Tensor | None = None,
) -> Tensor:
    """Attend over pages [P, K, PAGE, E], or over packed rows [1, K, T, E].

    Of packed rows a table holds the first row of the prefix.
    """
    _need_contiguous_rows(q, keys, values)
    (tokens, heads, width), kv_heads = q.shape, keys.shape[1]
    splits = triton.cdiv(rows.max_length, SPLIT_KEYS.value)
    apart = splits > 1 and 4 * splits * tokens * heads * (width + 2) <= scratch_bytes
    sums = q.new_empty(2, splits, tokens, heads, dtype=torch.float32) if apart else None
    parts = q.new_empty(splits, tokens, heads, width, dtype=torch.float32) if apart else None
    out = torch.zeros_like(q, memory_format=torch.contiguous_format) if parts is None else parts
    # A program whose keys are all hidden stores nothing: its peak stays -inf.
    peaks, totals = (None, None) if sums is None else (sums[0].fill_(float("-inf")), sums[1])
    # Each sequence fills its tiles but the last, so T * group / 16 + S suffice for any counts.
    tiles = tokens * (heads // kv_heads) // BLOCK_Q.value + len(rows.count)
    shape = {"WIDTH": width, "BLOCK_E": max(16, triton.next_power_of_2(width))}
    attend_kernel[tiles, kv_heads, splits if apart else 1](
        q,
        keys,
        values,
        out,
        peaks,
        totals,
        lse,
        rows.tables,
        rows.first,
        rows.count,
        rows.start,
        len(rows.count),
        tokens,
        rows.tables.stride(0),
        *q.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        scale * math.log2(math.e),
        (1 << 30) if window is None else window,
        GROUP=heads // kv_heads,
        PAGE=keys.shape[2] if paged else 1,
        PAGED=paged,
        APART=apart,
        **shape,
        num_warps=4,
        num_stages=2,
    )
    if not apart:
        return out
    merged = torch.empty_like(q, memory_format=torch.contiguous_format)
    merge_kernel[(tokens * heads,)](peaks, totals, out, merged, lse, splits, **shape, num_warps=1)
    return merged


def _need_contiguous_rows(*tensors: Tensor) -> None:
    for t in tensors:
        if t.stride(-1) != 1:
            found = f"a tensor {tuple(t.shape)} has strides {t.stride()}"
            raise ValueError(f"{found}, expected 1 in the last dimension")


def _aligned_rows(*tensors: Tensor) -> bool:
    """Tell whether tensor descriptors can describe the tensors."""
    return not any(t.data_ptr() % 16 or t.stride(0) * t.element_size() % 16 for t in tensors)
