"""Batch-invariant matmul and attention in Triton: an output row has the same bits whatever rows
surround it.

Four rules make it so:
  1. tile shapes are constants, so that one row and ten thousand take the same matrix instruction, and no integer that
     changes from step to step (rows, sequences, window) picks another compilation;
  2. a sum runs in one order: inputs ascending; keys ascending in blocks of 64 inside splits of 512 counted from
     position 0, and splits joined ascending, by one program or, when there is room for partial results, by a second
     kernel;
  3. what a row cannot see changes nothing: a masked key weighs exp2(-inf) = 0, a masked block or split leaves the sums
     multiplied by exp2(0) = 1;
  4. sums across blocks are explicit fused multiply-adds, so that no compiler contracts them in one kernel only.

Attention over pages (engine) and over packed rows (trainer) is one kernel that differs in where it
finds a key. Forward only; E, the head size, must be the contiguous dimension of every tensor. The
kernels run on the current CUDA device, or on the CPU in Triton's interpreter when
TRITON_INTERPRET=1 was set before triton was imported. Nothing here knows layers, plans, sampling or
gradients. Checked by `pytest tests/gpu`.
"""

# What @triton.jit compiles is not typed Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# rows, outputs and inputs of a tile; 64 rows are what Hopper's wgmma takes
MATMUL_TILE = tl.constexpr(64)
ROW_GROUP = tl.constexpr(8)  # row tiles that walk the weight together while it is in the L2 cache
# (token, query head) pairs of a tile: the smallest that mma takes, so decode wastes least
BLOCK_Q = tl.constexpr(16)
BLOCK_KEYS = tl.constexpr(64)
SPLIT_KEYS = tl.constexpr(512)
SEQUENCES_AT_ONCE = tl.constexpr(256)
# partial results of one attention call; beyond it one program walks all splits of a tile
SCRATCH_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedRows:
    """Which rows of q belong to which sequence, and where its keys lie. Sequence s has `count[s]`
    new tokens, token i in row first[s] + i of q and at position start[s] + i; it sees keys 0 ..
    start[s] + i. A count of 0 is an unused place, whatever its other fields hold. The keys of the
    new tokens are in the cache already.

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


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, I], weight [O, I], bias [O], all of one dtype -> [N, O] of that dtype; sums are
    float32."""
    _need_contiguous_rows(x, weight)
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = x.new_empty(rows, outputs)
    grid = (triton.cdiv(outputs, MATMUL_TILE.value), triton.cdiv(rows, MATMUL_TILE.value))
    _matmul_kernel[grid](
        x,
        weight,
        bias,
        out,
        rows,
        outputs,
        inputs,
        x.stride(0),
        weight.stride(0),
        num_warps=4,
        num_stages=3,
    )
    return out


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    scale: float,
    window: int | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Tensor:
    """q [T, H, E], keys and values [P, K, PAGE, E], PAGE a multiple of 64 -> [T, H, E]; zeros for
    rows of no sequence.

    With a window w a token sees itself and the w - 1 before it. scratch_bytes bounds the partial
    results of splits that run beside each other; it moves time and memory, never a bit. The launch
    depends on shapes and on max_length only, so it can be captured in a CUDA graph.
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
) -> Tensor:
    """`attention` for packed rows: q [T, H, E], keys and values [T, K, E] -> [T, H, E]; zeros for
    rows of no segment.

    segments int [S, 4] holds (first row, rows, first row of the prefix, rows of the prefix): token
    i of a segment stands at position prefix + i and sees the prefix and the segment's rows up to
    its own.
    """
    first, count, prefix_first, prefix = segments.to(q.device, torch.int32).t().contiguous()
    rows = PagedRows(
        tables=prefix_first[:, None], first=first, count=count, start=prefix, max_length=len(q)
    )
    keys, values = (t.transpose(0, 1)[None] for t in (keys, values))  # one page [1, K, T, E]
    return _attend(q, keys, values, rows, False, scale, window, scratch_bytes)


def write_cache(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Copies k and v [T, K, E] into pages [P, K, PAGE, E] in place; slots int64 [T] = page * PAGE +
    offset, -1 = skip."""
    _need_contiguous_rows(k, v, keys, values)
    _, heads, width = k.shape
    _write_kernel[(len(k),)](
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
) -> Tensor:
    """keys and values [P, K, PAGE, E], or [1, K, T, E] where a table holds the first row of a
    prefix instead of pages."""
    _need_contiguous_rows(q, keys, values)
    (tokens, heads, width), kv_heads = q.shape, keys.shape[1]
    splits = triton.cdiv(rows.max_length, SPLIT_KEYS.value)
    apart = splits > 1 and 4 * splits * tokens * heads * (width + 2) <= scratch_bytes
    sums = q.new_empty(2, splits, tokens, heads, dtype=torch.float32) if apart else None
    out = (
        q.new_empty(splits, tokens, heads, width, dtype=torch.float32)
        if apart
        else torch.zeros_like(q)
    )
    # A program that finds nothing to see exits without a word: its peak stays -inf.
    peaks, totals = (None, None) if sums is None else (sums[0].fill_(float("-inf")), sums[1])
    # Each sequence fills its tiles but the last, so T * group / 16 + S are enough without knowing a
    # count.
    tiles = tokens * (heads // kv_heads) // BLOCK_Q.value + len(rows.count)
    shape = {"WIDTH": width, "BLOCK_E": max(16, triton.next_power_of_2(width))}
    _attend_kernel[tiles, kv_heads, splits if apart else 1](
        q,
        keys,
        values,
        out,
        peaks,
        totals,
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
    _merge_kernel[(tokens * heads,)](peaks, totals, out, merged, splits, **shape, num_warps=1)
    return merged


def _need_contiguous_rows(*tensors: Tensor) -> None:
    for t in tensors:
        if t.stride(-1) != 1:
            raise ValueError(
                f"a tensor {tuple(t.shape)} has strides {t.stride()}, expected 1 in the last dimension"
            )


@triton.jit
def _dot(a, b, acc):
    """a @ b + acc in float32, without TF32. The interpreter multiplies bfloat16 as if it were
    integers."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(x, weight, bias, out, rows, outputs, inputs, x_row, weight_row):
    """One tile of out [rows, outputs]."""
    row_tile, output_tile = tl.swizzle2d(
        tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), ROW_GROUP
    )
    row = (row_tile * MATMUL_TILE + tl.arange(0, MATMUL_TILE)).to(tl.int64)
    output = (output_tile * MATMUL_TILE + tl.arange(0, MATMUL_TILE)).to(tl.int64)
    acc = tl.zeros([MATMUL_TILE, MATMUL_TILE], tl.float32)
    for base in range(0, inputs, MATMUL_TILE):
        index = base + tl.arange(0, MATMUL_TILE)
        a = tl.load(
            x + row[:, None] * x_row + index,
            mask=(row < rows)[:, None] & (index < inputs),
            other=0.0,
        )
        b = tl.load(
            weight + output[:, None] * weight_row + index,
            mask=(output < outputs)[:, None] & (index < inputs),
            other=0.0,
        )
        acc = _dot(a, tl.trans(b), acc)
    if bias is not None:
        acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
    inside = (row < rows)[:, None] & (output < outputs)
    tl.store(out + row[:, None] * outputs + output, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _locate(count, sequences, tile, GROUP: tl.constexpr):
    """(sequence, its tile) of the tile-th tile when each sequence takes ceil(count * GROUP /
    BLOCK_Q) of them."""
    seen, sequence, before = 0, 0, 0
    for base in range(0, sequences, SEQUENCES_AT_ONCE):
        index = base + tl.arange(0, SEQUENCES_AT_ONCE)
        tiles = tl.cdiv(tl.load(count + index, mask=index < sequences, other=0) * GROUP, BLOCK_Q)
        passed = seen + tl.cumsum(tiles, 0) <= tile
        sequence += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, tiles, 0), 0)
        seen += tl.sum(tiles, 0)
    return sequence, tile - before


@triton.jit
def _see(query, key, value, visible, scale, peak, total, acc):
    """The running softmax of a tile (peak [R], total [R], acc [R, E]) after one more block of
    keys."""
    scores = _dot(query, tl.trans(key), tl.zeros([BLOCK_Q, BLOCK_KEYS], tl.float32)) * scale
    scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    faded, weight = tl.exp2(peak - shift), tl.exp2(scores - shift[:, None])
    seen = _dot(weight.to(value.dtype), value, tl.zeros_like(acc))
    return highest, tl.fma(total, faded, tl.sum(weight, 1)), tl.fma(acc, faded[:, None], seen)


@triton.jit
def _join(peak, total, acc, next_peak, next_total, next_acc):
    """The running softmax after one more split; exactly itself when nothing was visible in that
    split."""
    highest = tl.maximum(peak, next_peak)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    faded, weight = tl.exp2(peak - shift), tl.exp2(next_peak - shift)
    total = tl.fma(next_total, weight, total * faded)
    return highest, total, tl.fma(next_acc, weight[:, None], acc * faded[:, None])


@triton.jit
def _mean(total, acc):
    """acc / total, zero where nothing was seen; + 0.0 because a later no-op may have turned -0.0
    into 0.0."""
    return acc / tl.where(total > 0.0, total, 1.0)[:, None] + 0.0


@triton.jit(do_not_specialize=["sequences", "rows", "table_stride", "window"])
def _attend_kernel(
    q,
    keys,
    values,
    out,
    peaks,
    totals,
    tables,
    first,
    count,
    start,
    sequences,
    rows,
    table_stride,
    q_token,
    q_head,
    k_page,
    k_head,
    k_token,
    v_page,
    v_head,
    v_token,
    scale,
    window,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    PAGED: tl.constexpr,
    APART: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """BLOCK_Q (token, query head) pairs of one sequence and key/value head, over one split or all
    of them."""
    sequence, tile = _locate(count, sequences, tl.program_id(0), GROUP)
    if sequence >= sequences:
        return
    kv_head, heads = tl.program_id(1), tl.num_programs(1) * GROUP
    own, new, past = tl.load(first + sequence), tl.load(count + sequence), tl.load(start + sequence)
    pair = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    token, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    position = past + token
    # no pair of the tile sees further
    end = past + tl.minimum(new, (tile * BLOCK_Q + BLOCK_Q - 1) // GROUP + 1)
    begin = tl.maximum(0, past + tile * BLOCK_Q // GROUP - window + 1)  # nor less far
    low, high = begin // SPLIT_KEYS, tl.cdiv(end, SPLIT_KEYS)
    if APART:
        low, high = tl.maximum(low, tl.program_id(2)), tl.minimum(high, tl.program_id(2) + 1)
        if low >= high:
            return

    element = tl.arange(0, BLOCK_E)
    inside = (token < new)[:, None] & (element < WIDTH)
    row = (own + token).to(tl.int64)
    query = tl.load(q + (row * q_token + head * q_head)[:, None] + element, mask=inside, other=0.0)
    peak, total = tl.full([BLOCK_Q], float("-inf"), tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_E], tl.float32)
    for split in range(low, high):
        split_peak, split_total = (
            tl.full([BLOCK_Q], float("-inf"), tl.float32),
            tl.zeros([BLOCK_Q], tl.float32),
        )
        split_acc = tl.zeros([BLOCK_Q, BLOCK_E], tl.float32)
        from_key = tl.maximum(split * SPLIT_KEYS, begin // BLOCK_KEYS * BLOCK_KEYS)
        for base in range(from_key, tl.minimum((split + 1) * SPLIT_KEYS, end), BLOCK_KEYS):
            key = base + tl.arange(0, BLOCK_KEYS)
            if PAGED:
                page = tl.load(tables + sequence.to(tl.int64) * table_stride + base // PAGE).to(
                    tl.int64
                )
                place = (key % PAGE).to(tl.int64)
            else:
                page = tl.zeros([], tl.int64)
                prefix = tl.load(tables + sequence.to(tl.int64) * table_stride)
                place = tl.where(key < past, prefix + key, own + key - past).to(tl.int64)
            there = (key < end)[:, None] & (element < WIDTH)
            k_at, v_at = page * k_page + kv_head * k_head, page * v_page + kv_head * v_head
            k = tl.load(keys + k_at + (place * k_token)[:, None] + element, mask=there, other=0.0)
            v = tl.load(values + v_at + (place * v_token)[:, None] + element, mask=there, other=0.0)
            visible = (key <= position[:, None]) & (key > position[:, None] - window)
            split_peak, split_total, split_acc = _see(
                query, k, v, visible, scale, split_peak, split_total, split_acc
            )
        peak, total, acc = _join(peak, total, acc, split_peak, split_total, split_acc)

    at = (tl.program_id(2).to(tl.int64) * rows + row) * heads + head
    if APART:
        tl.store(peaks + at, peak, mask=token < new)
        tl.store(totals + at, total, mask=token < new)
    else:
        acc = _mean(total, acc)
    tl.store(out + at[:, None] * WIDTH + element, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(peaks, totals, parts, out, splits, WIDTH: tl.constexpr, BLOCK_E: tl.constexpr):
    """Joins the splits of one (row, head): peaks and totals [splits, T * H], parts [splits, T * H,
    E] -> out [T * H, E]."""
    at, pairs = tl.program_id(0).to(tl.int64) + tl.arange(0, 1), tl.num_programs(0).to(tl.int64)
    element = tl.arange(0, BLOCK_E)
    peak, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_E], tl.float32)
    for split in range(splits):
        part = split * pairs + at
        part_peak = tl.load(peaks + part)
        written = part_peak > float("-inf")
        part_total = tl.load(totals + part, mask=written, other=0.0)
        where = part[:, None] * WIDTH + element
        part_acc = tl.load(parts + where, mask=written[:, None] & (element < WIDTH), other=0.0)
        peak, total, acc = _join(peak, total, acc, part_peak, part_total, part_acc)
    mean = _mean(total, acc).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * WIDTH + element, mean, mask=(at >= 0)[:, None] & (element < WIDTH))


@triton.jit
def _write_kernel(
    k,
    v,
    keys,
    values,
    slots,
    k_row,
    k_head,
    v_row,
    v_head,
    keys_page,
    keys_head,
    keys_token,
    values_page,
    values_head,
    values_token,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All heads of one token."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    page, place = slot // PAGE, slot % PAGE
    head, element = tl.arange(0, BLOCK) // WIDTH, tl.arange(0, BLOCK) % WIDTH
    inside = head < HEADS
    key = tl.load(k + row * k_row + head * k_head + element, mask=inside)
    value = tl.load(v + row * v_row + head * v_head + element, mask=inside)
    tl.store(
        keys + page * keys_page + head * keys_head + place * keys_token + element, key, mask=inside
    )
    tl.store(
        values + page * values_page + head * values_head + place * values_token + element,
        value,
        mask=inside,
    )
