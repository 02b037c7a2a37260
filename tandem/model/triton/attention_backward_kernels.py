"""Backward pass of attention over packed segments in Triton (FlashAttention-2, Dao 2023,
arXiv 2307.08691, algorithm 2), with every sum in one fixed order.

Probabilities are computed again from the log-sum-exp that the forward pass stored. A program of
`query_gradient_kernel` owns a tile of queries and walks its keys in order. A program of
`key_gradient_kernel` owns a block of keys and walks the segments that see one of them, in order,
and of each its queries in order: so the gradient of a prefix is summed over the segments that share
it without atomics. Gradients are deterministic and not batch-invariant. `packed_attention.py`
launches the kernels.
"""

# Code that @triton.jit compiles is not typed Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from tandem.model.triton.attention_kernels import locate
from tandem.model.triton.matmul_kernels import dot

# packed rows for which one list of segments says who sees them; a multiple of every key block
LIST_ROWS = tl.constexpr(64)
# beyond every row; times the query heads of a group it is still an int32
NOWHERE = tl.constexpr(1 << 24)


@triton.jit
def _segment(segments, number, sequences):
    """Load (first row, rows, first row of the prefix, rows of the prefix) of a segment."""
    at = segments + number
    return (
        tl.load(at),
        tl.load(at + sequences),
        tl.load(at + 2 * sequences),
        tl.load(at + 3 * sequences),
    )


@triton.jit
def _slopes(query, key, value, above, visible, lse, delta, scale):
    """Compute probabilities [R, N] of a tile, and the gradients of its scaled scores."""
    scores = dot(query, tl.trans(key), tl.zeros_like(visible).to(tl.float32)) * scale
    probs = tl.where(visible, tl.exp2(scores - lse[:, None]), 0.0)
    grad_probs = dot(above, tl.trans(value), tl.zeros_like(probs))
    return probs, tl.where(visible, probs * (grad_probs - delta[:, None]), 0.0)


@triton.jit(do_not_specialize=["sequences", "window"])
def query_gradient_kernel(
    q,
    k,
    v,
    out,
    above,
    lse,
    deltas,
    grad_q,
    segments,
    sequences,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    scale,
    grad_scale,
    window,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute grad_q of PAIRS (token, query head) pairs of one segment and key/value head.

    It also stores their deltas [T, H], the sums of out * above, which `key_gradient_kernel` reads.
    out, above and grad_q are contiguous [T, H, E], segments int32 [4, S].
    """
    number, tile = locate(segments + sequences, sequences, tl.program_id(0), GROUP, PAIRS)
    if number >= sequences:
        return
    kv_head, heads = tl.program_id(1), tl.num_programs(1) * GROUP
    own, new, prefix, past = _segment(segments, number, sequences)
    pair = tile * PAIRS + tl.arange(0, PAIRS)
    token, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    position = past + token
    end = past + tl.minimum(new, (tile * PAIRS + PAIRS - 1) // GROUP + 1)
    begin = tl.maximum(0, past + tile * PAIRS // GROUP - window + 1)

    element, known = tl.arange(0, BLOCK_E), token < new
    inside = known[:, None] & (element < WIDTH)
    row = (own + token).to(tl.int64)
    at = row * heads + head
    where = at[:, None] * WIDTH + element
    query = tl.load(q + (row * q_token + head * q_head)[:, None] + element, mask=inside, other=0.0)
    grad = tl.load(above + where, mask=inside, other=0.0)
    result = tl.load(out + where, mask=inside, other=0.0)
    delta = tl.sum(result.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(deltas + at, delta, mask=known)
    total = tl.load(lse + at, mask=known, other=0.0)
    acc = tl.zeros([PAIRS, BLOCK_E], tl.float32)
    for base in range(begin // KEYS * KEYS, end, KEYS):
        index = base + tl.arange(0, KEYS)
        place = tl.where(index < past, prefix + index, own + index - past).to(tl.int64)
        there = (index < end)[:, None] & (element < WIDTH)
        key = tl.load(
            k + (place * k_token + kv_head * k_head)[:, None] + element, mask=there, other=0.0
        )
        value = tl.load(
            v + (place * v_token + kv_head * v_head)[:, None] + element, mask=there, other=0.0
        )
        visible = (index <= position[:, None]) & (index > position[:, None] - window)
        _, slope = _slopes(query, key, value, grad, visible & known[:, None], total, delta, scale)
        acc = dot(slope.to(key.dtype), key, acc)
    tl.store(grad_q + where, (acc * grad_scale).to(grad_q.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sequences", "tokens", "window"])
def key_gradient_kernel(
    q,
    k,
    v,
    above,
    lse,
    deltas,
    grad_k,
    grad_v,
    segments,
    viewers,
    starts,
    sequences,
    tokens,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    scale,
    grad_scale,
    window,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute grad_k and grad_v, contiguous [T, K, E], of KEYS packed rows and a key/value head.

    viewers int32 lists the segments that see a row of each LIST_ROWS, list n from starts[n] to
    starts[n + 1].
    """
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    heads = kv_heads * GROUP
    row = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    element, place = tl.arange(0, BLOCK_E), row.to(tl.int64)
    there = (row < tokens)[:, None] & (element < WIDTH)
    key = tl.load(
        k + (place * k_token + kv_head * k_head)[:, None] + element, mask=there, other=0.0
    )
    value = tl.load(
        v + (place * v_token + kv_head * v_head)[:, None] + element, mask=there, other=0.0
    )
    grad_key = tl.zeros([KEYS, BLOCK_E], tl.float32)
    grad_value = tl.zeros([KEYS, BLOCK_E], tl.float32)
    block = tl.program_id(0) * KEYS // LIST_ROWS
    for listed in range(tl.load(starts + block), tl.load(starts + block + 1)):
        own, new, prefix, past = _segment(segments, tl.load(viewers + listed), sequences)
        before = (row >= prefix) & (row < prefix + past)
        known = before | ((row >= own) & (row < own + new))
        # where the segment's queries see the key
        index = tl.where(before, row - prefix, past + row - own)
        first = tl.maximum(0, tl.min(tl.where(known, index, NOWHERE), 0) - past)
        last = tl.minimum(new, tl.max(tl.where(known, index, -NOWHERE), 0) + window - past)
        for base in range(first * GROUP // PAIRS * PAIRS, last * GROUP, PAIRS):
            pair = base + tl.arange(0, PAIRS)
            token, head = pair // GROUP, kv_head * GROUP + pair % GROUP
            position, asks = past + token, token < new
            inside = asks[:, None] & (element < WIDTH)
            query_row = (own + token).to(tl.int64)
            at = query_row * heads + head
            query = tl.load(
                q + (query_row * q_token + head * q_head)[:, None] + element, mask=inside, other=0.0
            )
            grad = tl.load(above + at[:, None] * WIDTH + element, mask=inside, other=0.0)
            total = tl.load(lse + at, mask=asks, other=0.0)
            delta = tl.load(deltas + at, mask=asks, other=0.0)
            visible = (index <= position[:, None]) & (index > position[:, None] - window)
            probs, slope = _slopes(
                query, key, value, grad, visible & known & asks[:, None], total, delta, scale
            )
            grad_value = dot(tl.trans(probs.to(grad.dtype)), grad, grad_value)
            grad_key = dot(tl.trans(slope.to(query.dtype)), query, grad_key)
    where = (place * kv_heads + kv_head)[:, None] * WIDTH + element
    tl.store(grad_k + where, (grad_key * grad_scale).to(grad_k.dtype.element_ty), mask=there)
    tl.store(grad_v + where, grad_value.to(grad_v.dtype.element_ty), mask=there)
