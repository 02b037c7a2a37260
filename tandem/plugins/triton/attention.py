"""Batch-invariant attention in Triton: a row's output bits do not depend on other rows.

Four rules make it so:
  1. tile shapes are constants of a model, so one row and ten thousand take the same matrix
     instruction, and no integer that changes from step to step (rows, sequences, window) picks
     another compilation;
  2. a sum runs in one order: keys ascending in blocks of 64 inside splits of 512 counted from
     position 0; splits joined ascending, by one program or, when there is room for partial results,
     by a second kernel;
  3. hidden keys change nothing: a masked key weighs exp2(-inf) = 0, a masked block or split
     multiplies the sums by exp2(0) = 1;
  4. sums across blocks are explicit fused multiply-adds, so that no compiler contracts them in one
     kernel only.

Attention over pages (engine) and over packed rows (trainer) is one kernel that differs in where it
finds a key. E, the head size, must be the contiguous dimension of every tensor. Knows no layers,
plans and gradients (packed_attention.py). Checked by `pytest tests/gpu`.
"""

# Code that @triton.jit compiles is not typed Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.attention import Scoring
from tandem.plugins.triton.matmul import dot, need_contiguous_rows

# Partial results of one attention call; beyond it one program walks all splits of a tile.
SCRATCH_BYTES = 1 << 28
# Tiles of a pass that fill a GPU by themselves: their splits need not run beside each other.
MANY_TILES = 512
BLOCK_KEYS = tl.constexpr(64)
SPLIT_KEYS = tl.constexpr(512)
PAGES = (64, 128, 256, 512)  # tokens of a page: whole blocks of a split
SEQUENCES_AT_ONCE = tl.constexpr(256)


@triton.jit
def locate(count, sequences, tile, GROUP: tl.constexpr, PAIRS: tl.constexpr):
    """Find (sequence, tile in it) of a tile; each sequence has ceil(count * GROUP / PAIRS)."""
    seen, sequence, before = 0, 0, 0
    for base in range(0, sequences, SEQUENCES_AT_ONCE):
        index = base + tl.arange(0, SEQUENCES_AT_ONCE)
        tiles = tl.cdiv(tl.load(count + index, mask=index < sequences, other=0) * GROUP, PAIRS)
        passed = seen + tl.cumsum(tiles, 0) <= tile
        sequence += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, tiles, 0), 0)
        seen += tl.sum(tiles, 0)
    return sequence, tile - before


@triton.jit
def own_rows(
    first, count, sequences, GROUP: tl.constexpr, PAIRS: tl.constexpr, ALONE: tl.constexpr
):
    """Find (sequence, tile in it, its first row, its rows) of a program; of none there are 0."""
    if ALONE:
        tiles: tl.constexpr = (GROUP + PAIRS - 1) // PAIRS
        sequence, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
        own = sequence
    else:
        sequence, tile = locate(count, sequences, tl.program_id(0), GROUP, PAIRS)
        own = tl.load(first + sequence, mask=sequence < sequences, other=0)
    return sequence, tile, own, tl.load(count + sequence, mask=sequence < sequences, other=0)


@triton.jit
def _pages(tables, sequence, table_stride, split, end, PAGE: tl.constexpr):
    """Load the pages of a split, and their numbers in the sequence: before the loop over its keys,
    whose loads then follow no other load, and so are issued blocks ahead."""
    number = split * (SPLIT_KEYS // PAGE) + tl.arange(0, SPLIT_KEYS // PAGE)
    at = sequence.to(tl.int64) * table_stride + number
    return number, tl.load(tables + at, mask=number * PAGE < end, other=0)


@triton.jit
def _start(PAIRS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the running softmax (peak, total, acc) of no key."""
    peak, total = tl.full([PAIRS], float("-inf"), tl.float32), tl.zeros([PAIRS], tl.float32)
    return peak, total, tl.zeros([PAIRS, BLOCK_E], tl.float32)


@triton.jit
def _see(query, key, value, visible, scale, peak, total, acc):
    """Add a block of keys to the running softmax (peak [R], total [R], acc [R, E]) of a tile."""
    scores = dot(query, tl.trans(key), tl.zeros_like(visible).to(tl.float32)) * scale
    scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    faded, weight = tl.exp2(peak - shift), tl.exp2(scores - shift[:, None])
    seen = dot(weight.to(value.dtype), value, tl.zeros_like(acc))
    return highest, tl.fma(total, faded, tl.sum(weight, 1)), tl.fma(acc, faded[:, None], seen)


@triton.jit
def _join(peak, total, acc, next_peak, next_total, next_acc):
    """Add a split to the running softmax; a split of hidden keys leaves it exactly as it is."""
    highest = tl.maximum(peak, next_peak)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    faded, weight = tl.exp2(peak - shift), tl.exp2(next_peak - shift)
    total = tl.fma(next_total, weight, total * faded)
    return highest, total, tl.fma(next_acc, weight[:, None], acc * faded[:, None])


@triton.jit
def _mean(total, acc):
    """Compute acc / total, zero if every key is hidden."""
    # + 0.0 because a later no-op may have turned -0.0 into 0.0
    return acc / tl.where(total > 0.0, total, 1.0)[:, None] + 0.0


@triton.jit
def _store_lse(lse, at, peak, total, mask):
    """Store the base-2 log-sum-exp of the scores, if a backward pass will read it."""
    if lse is not None:
        tl.store(lse + at, peak + tl.log2(tl.where(total > 0.0, total, 1.0)), mask=mask)


@triton.jit(do_not_specialize=["sequences", "rows", "table_stride", "window"])
def attend_kernel(
    q,
    keys,
    values,
    out,
    peaks,
    totals,
    lse,
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
    JOIN: tl.constexpr,
    ALONE: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Attend PAIRS (token, query head) pairs of one sequence and key/value head.

    With APART it attends one split and stores its partial result, otherwise all splits, of which
    there is one without JOIN. lse [T, H] may be None. ALONE: each sequence has at most one token,
    in the row of its number, and every row is written.
    """
    sequence, tile, own, new = own_rows(first, count, sequences, GROUP, PAIRS, ALONE)
    kv_head, heads = tl.program_id(1), tl.num_programs(1) * GROUP
    past = tl.load(start + sequence, mask=new > 0, other=0)
    pair = tile * PAIRS + tl.arange(0, PAIRS)
    token, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    position = past + token
    # no pair of the tile sees further
    end = past + tl.minimum(new, (tile * PAIRS + PAIRS - 1) // GROUP + 1)
    begin = tl.maximum(0, past + tile * PAIRS // GROUP - window + 1)  # nor less far
    low, high = begin // SPLIT_KEYS, tl.cdiv(end, SPLIT_KEYS)
    if APART:
        low, high = tl.maximum(low, tl.program_id(2)), tl.minimum(high, tl.program_id(2) + 1)

    element = tl.arange(0, BLOCK_E)
    inside = (token < (1 if ALONE else new))[:, None] & (element < WIDTH)
    row = (own + token).to(tl.int64)
    query = tl.load(q + (row * q_token + head * q_head)[:, None] + element, mask=inside, other=0.0)
    peak, total, acc = _start(PAIRS, BLOCK_E)
    prefix = 0 if PAGED else tl.load(tables + sequence * table_stride, mask=new > 0, other=0)
    for split in range(low, high):
        split_peak, split_total, split_acc = _start(PAIRS, BLOCK_E)
        from_key = tl.maximum(split * SPLIT_KEYS, begin // BLOCK_KEYS * BLOCK_KEYS)
        if PAGED:
            number, pages = _pages(tables, sequence, table_stride, split, end, PAGE)
        for base in range(from_key, tl.minimum((split + 1) * SPLIT_KEYS, end), BLOCK_KEYS):
            key = base + tl.arange(0, BLOCK_KEYS)
            if PAGED:
                page = tl.sum(tl.where(number == base // PAGE, pages, 0), 0).to(tl.int64)
                place = key % PAGE
            else:
                page = tl.zeros([], tl.int64)
                place = tl.where(key < past, prefix + key, own + key - past).to(tl.int64)
            there = (key < end)[:, None] & (element < WIDTH)
            k_at, v_at = page * k_page + kv_head * k_head, page * v_page + kv_head * v_head
            k = tl.load(keys + k_at + (place * k_token)[:, None] + element, mask=there, other=0.0)
            v = tl.load(values + v_at + (place * v_token)[:, None] + element, mask=there, other=0.0)
            visible = (key <= position[:, None]) & (key > position[:, None] - window)
            split_peak, split_total, split_acc = _see(
                query, k, v, visible, scale, split_peak, split_total, split_acc
            )
        if JOIN:
            peak, total, acc = _join(peak, total, acc, split_peak, split_total, split_acc)
        else:
            peak, total, acc = split_peak, split_total, split_acc

    # computed again, in 64 bits, so that no register holds it through the loops
    pair = (tile * PAIRS).to(tl.int64) + tl.arange(0, PAIRS)
    token, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    stored = token < (1 if ALONE else new)
    inside = stored[:, None] & (element < WIDTH)
    at = (tl.program_id(2).to(tl.int64) * rows + own + token) * heads + head
    if APART:
        tl.store(peaks + at, peak, mask=stored)
        tl.store(totals + at, total, mask=stored)
        inside &= (peak > float("-inf"))[:, None]
    else:
        _store_lse(lse, at, peak, total, stored)
        acc = _mean(total, acc)
    tl.store(out + at[:, None] * WIDTH + element, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "table_stride", "tile_stride", "window"])
def attend_split_kernel(
    q,
    keys,
    values,
    parts,
    peaks,
    totals,
    tables,
    first,
    count,
    start,
    tile_first,
    tile_count,
    tile_end,
    shared_end,
    rows,
    table_stride,
    tile_stride,
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
    ALONE: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Attend one split of one key/value head in decode: the keys that the sequences of a tile
    share, or with ALONE those behind them of one sequence, on top of the sums it has."""
    kv_head, split = tl.program_id(1), tl.program_id(2)
    tile, low, high = split * tile_stride + tl.program_id(0), split * SPLIT_KEYS, 0
    if ALONE:
        leader, members, high = (
            tl.program_id(0),
            tl.load(count + tl.program_id(0)),
            low + SPLIT_KEYS,
        )
        low = tl.maximum(low, tl.load(shared_end + tile))
    else:
        leader, members, high = (
            tl.load(tile_first + tile),
            tl.load(tile_count + tile),
            tl.load(tile_end + tile),
        )
    resumed = low > split * SPLIT_KEYS
    pair = tl.arange(0, PAIRS)
    there, head = pair < members * GROUP, kv_head * GROUP + pair % GROUP
    position = tl.load(start + leader + pair // GROUP, mask=there, other=-1)
    end = tl.max(position, 0) + 1  # no pair of the tile sees further
    nearest = tl.min(tl.where(there, position, end), 0)
    begin = tl.maximum(0, nearest - window + 1)  # nor less far
    low, high = tl.maximum(low, begin // BLOCK_KEYS * BLOCK_KEYS), tl.minimum(high, end)
    if low >= high:
        return

    element = tl.arange(0, BLOCK_E)
    inside = there[:, None] & (element < WIDTH)
    row = tl.load(first + leader + pair // GROUP, mask=there, other=0).to(tl.int64)
    query = tl.load(q + (row * q_token + head * q_head)[:, None] + element, mask=inside, other=0.0)
    at = (split.to(tl.int64) * rows + row) * tl.num_programs(1) * GROUP + head
    peak = tl.load(peaks + at, mask=there & resumed, other=float("-inf"))
    written = peak > float("-inf")
    total = tl.load(totals + at, mask=written, other=0.0)
    acc = tl.load(parts + at[:, None] * WIDTH + element, mask=inside & written[:, None], other=0.0)
    number, pages = _pages(tables, leader, table_stride, split, end, PAGE)
    for base in range(low, high, BLOCK_KEYS):
        key = base + tl.arange(0, BLOCK_KEYS)
        page = tl.sum(tl.where(number == base // PAGE, pages, 0), 0).to(tl.int64)
        place, seen = key % PAGE, (key < end)[:, None] & (element < WIDTH)
        k_at, v_at = page * k_page + kv_head * k_head, page * v_page + kv_head * v_head
        k = tl.load(keys + k_at + (place * k_token)[:, None] + element, mask=seen, other=0.0)
        v = tl.load(values + v_at + (place * v_token)[:, None] + element, mask=seen, other=0.0)
        visible = (key <= position[:, None]) & (key > position[:, None] - window)
        peak, total, acc = _see(query, k, v, visible, scale, peak, total, acc)

    tl.store(peaks + at, peak, mask=there)
    tl.store(totals + at, total, mask=there)
    tl.store(parts + at[:, None] * WIDTH + element, acc, mask=inside)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    peaks, totals, parts, out, lse, splits, WIDTH: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Join the splits of one (row, head) into out [T * H, E].

    peaks and totals are [splits, T * H], parts are [splits, T * H, E]; lse [T * H] may be None.
    """
    at, pairs = tl.program_id(0).to(tl.int64) + tl.arange(0, 1), tl.num_programs(0).to(tl.int64)
    element = tl.arange(0, BLOCK_E)
    peak, total, acc = _start(1, BLOCK_E)
    for split in range(splits):
        part = split * pairs + at
        part_peak = tl.load(peaks + part)
        written = part_peak > float("-inf")
        part_total = tl.load(totals + part, mask=written, other=0.0)
        where = part[:, None] * WIDTH + element
        part_acc = tl.load(parts + where, mask=written[:, None] & (element < WIDTH), other=0.0)
        peak, total, acc = _join(peak, total, acc, part_peak, part_total, part_acc)
    _store_lse(lse, at, peak, total, at >= 0)
    mean = _mean(total, acc).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * WIDTH + element, mean, mask=(at >= 0)[:, None] & (element < WIDTH))


@triton.jit
def write_kernel(
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
    """Copy all heads of one token into its slot."""
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
    paged: bool = True  # of packed rows a table holds the first row of the prefix
    # sequence s has one token at most, in row s; rows beyond the sequences are zero too
    alone: bool = False


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    scoring: Scoring,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Tensor:
    """Attend q [T, H, E] over keys and values [P, K, PAGE, E], PAGE a multiple of 64, to [T, H, E].

    Rows of no sequence are zero. scoring: without a soft cap and sinks, which no kernel knows.
    scratch_bytes bounds the partial results of splits that run beside each other; it changes time
    and memory, never a bit. The launch depends on shapes and on max_length only, so it can be
    captured in a CUDA graph.
    """
    if keys.shape[2] not in PAGES:
        raise ValueError(f"a page holds {keys.shape[2]} tokens, expected one of {PAGES}")
    return _attend(q, keys, values, rows, scoring, scratch_bytes)


def segment_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    segments: Tensor,
    scoring: Scoring,
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
        tables=prefix_first[:, None],
        first=first,
        count=count,
        start=prefix,
        max_length=len(q),
        paged=False,
    )
    keys, values = (t.transpose(0, 1)[None] for t in (keys, values))  # one page [1, K, T, E]
    return _attend(q, keys, values, rows, scoring, scratch_bytes, lse)


def write_cache(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Copy k and v [T, K, E] into pages [P, K, PAGE, E] in place.

    slots int64 [T] are page * PAGE + offset, or -1 for a row to skip.
    """
    need_contiguous_rows(k, v, keys, values)
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


def tile_pairs(rows: Tensor) -> int:
    """Count the (token, query head) pairs of a tile of queries, or of their keys, [..., E].

    It is a constant of a model, so that one token and ten thousand take the same instruction: 64
    are the rows of Hopper's wgmma, and a pass reads a key once for all of them. float32, whose
    products are no matrix instructions, and wide heads have 16, which fit registers.
    """
    return 64 if rows.element_size() == 2 and rows.shape[-1] <= 128 else 16


def tile_options(q: Tensor) -> dict[str, int]:
    """Choose the tile of q's attention, and how a program runs it: blocks of keys are loaded two
    ahead, of wide heads, which fill the shared memory, one."""
    pairs = tile_pairs(q)
    return {"PAIRS": pairs, "num_warps": 4, "num_stages": 3 if pairs == 64 else 2}


def scale_and_window(scoring: Scoring) -> tuple[float, int]:
    """Return them as the kernels take them: of a base-2 exponential, and a number for no window."""
    return scoring.scale * math.log2(math.e), scoring.window or 1 << 30


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    scoring: Scoring,
    scratch_bytes: int,
    lse: Tensor | None = None,
) -> Tensor:
    """Attend over pages [P, K, PAGE, E], or over packed rows [1, K, T, E]."""
    need_contiguous_rows(q, keys, values)
    (tokens, heads, width), kv_heads = q.shape, keys.shape[1]
    splits = triton.cdiv(rows.max_length, SPLIT_KEYS.value)
    group, pairs = heads // kv_heads, tile_pairs(q)
    # Each sequence fills its tiles but the last, so T * group / pairs + S suffice for any counts.
    tiles, made = tokens * group // pairs + len(rows.count), torch.zeros_like
    apart = splits > 1 and 4 * splits * tokens * heads * (width + 2) <= scratch_bytes
    apart &= rows.alone or tiles * kv_heads < MANY_TILES
    sums = q.new_empty(2, splits, tokens, heads, dtype=torch.float32) if apart else None
    parts = q.new_empty(splits, tokens, heads, width, dtype=torch.float32) if apart else None
    if rows.alone:
        tiles, made = tokens * triton.cdiv(group, pairs), torch.empty_like
    elif sums is not None:
        sums[0].fill_(float("-inf"))  # of splits that a row does not see nothing is stored
    out = made(q, memory_format=torch.contiguous_format) if parts is None else parts
    peaks, totals = (None, None) if sums is None else sums
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
        *scale_and_window(scoring),
        GROUP=group,
        PAGE=keys.shape[2] if rows.paged else 1,
        PAGED=rows.paged,
        APART=apart,
        JOIN=splits > 1 and not apart,
        ALONE=rows.alone,
        **shape,
        **tile_options(q),
    )
    if not apart:
        return out
    merged = torch.empty_like(q, memory_format=torch.contiguous_format)
    merge_kernel[(tokens * heads,)](peaks, totals, out, merged, lse, splits, **shape, num_warps=1)
    return merged
