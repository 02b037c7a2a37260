"""RMSNorm, rotary embedding and SwiGLU in Triton, forward and backward, float32 inside.

A program owns whole rows, and how many follows from their width alone, so a row's bits do not
depend on other rows. The one sum over rows, the gradient of a norm's weight, runs in an order that
depends on their number only. The last dimension of x must be contiguous; results are contiguous
and of x's dtype. Knows no layers.
"""

# Code that @triton.jit compiles is not typed Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.plugins.triton.matmul import add, need_contiguous_rows, swiglu_of

# elements of a program that owns several rows
TILE = 1024
# programs that share the sum over rows; a constant, so that no GPU sums in another order
WEIGHT_PARTS = 256


@triton.jit
def _inverse_rms(value, epsilon, WIDTH: tl.constexpr):
    """Compute 1 / sqrt(mean of squares + epsilon) [R] of rows [R, WIDTH], padded with zeros."""
    return tl.rsqrt(tl.sum(value * value, 1) / WIDTH + epsilon)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x,
    change,
    weight,
    total,
    out,
    rows,
    heads,
    x_token,
    x_head,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Norm ROWS rows (token, head) of x + change into out; change and total may be None.

    The sum is stored in total, and the norm is that of the sum as it is stored.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    element = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (element < WIDTH)
    at = (row // heads * x_token + row % heads * x_head)[:, None] + element
    where = row[:, None] * WIDTH + element
    value = tl.load(x + at, mask=inside, other=0.0)
    if change is not None:
        added = tl.load(change + where, mask=inside, other=0.0)
        value = add(value, added)
        tl.store(total + where, value, mask=inside)
    value = value.to(tl.float32)
    factor = tl.load(weight + element, mask=element < WIDTH, other=0.0).to(tl.float32)
    normed = value * _inverse_rms(value, epsilon, WIDTH)[:, None] * factor
    tl.store(out + where, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward_kernel(
    x,
    weight,
    above,
    above_total,
    grad_x,
    grad_weights,
    rows,
    heads,
    x_token,
    x_head,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute grad_x of every n-th ROWS rows, n being the number of programs.

    The gradient of the weight over these rows goes to grad_weights [n, WIDTH]. above_total, the
    gradient of x itself, may be None.
    """
    element = tl.arange(0, BLOCK)
    factor = tl.load(weight + element, mask=element < WIDTH, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (element < WIDTH)
        at = (row // heads * x_token + row % heads * x_head)[:, None] + element
        where = row[:, None] * WIDTH + element
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(above + where, mask=inside, other=0.0).to(tl.float32)
        inverse = _inverse_rms(value, epsilon, WIDTH)[:, None]
        normed, slope = value * inverse, grad * factor
        along = tl.sum(slope * normed, 1)[:, None] / WIDTH
        result = (slope - normed * along) * inverse
        if above_total is not None:
            result += tl.load(above_total + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + where, result.to(grad_x.dtype.element_ty), mask=inside)
        grad_weight += tl.sum(grad * normed, 0)
    own = grad_weights + tl.program_id(0) * WIDTH + element
    tl.store(own, grad_weight, mask=element < WIDTH)


@triton.jit(do_not_specialize=["rows"])
def rotate_kernel(
    x,
    cosine,
    sine,
    out,
    rows,
    heads,
    x_token,
    x_head,
    BACKWARD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rotate ROWS rows (token, head): x * cosine + (x with its halves swapped) * sine.

    cosine and sine are [T, WIDTH]. Backward swaps the halves of the product instead.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    element = tl.arange(0, BLOCK)
    other = (element + WIDTH // 2) % WIDTH
    inside = (row < rows)[:, None] & (element < WIDTH)
    start = (row // heads * x_token + row % heads * x_head)[:, None]
    angle = (row // heads * WIDTH)[:, None]
    value = tl.load(x + start + element, mask=inside, other=0.0).to(tl.float32)
    swapped = tl.load(x + start + other, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cosine + angle + element, mask=inside, other=0.0).to(tl.float32)
    # not rotated by the sine of its own place, but of the place that it is added to
    at = other if BACKWARD else element
    sin = tl.load(sine + angle + at, mask=inside, other=0.0).to(tl.float32)
    result = tl.fma(value, cos, swapped * sin)
    tl.store(out + row[:, None] * WIDTH + element, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "new"])
def heads_kernel(
    x,
    q_weight,
    k_weight,
    cosine,
    sine,
    slots,
    out,
    keys,
    values,
    rows,
    new,
    epsilon,
    keys_page,
    keys_head,
    keys_token,
    values_page,
    values_head,
    values_token,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Norm and rotate ROWS rows (token, head) of x [T, H + 2K, WIDTH]: queries into out [T, H,
    WIDTH]; keys, and values as they are, of the first `new` tokens into their slots.

    Weights are None without norms. A slot of -1 is skipped.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    element = tl.arange(0, BLOCK)
    other = (element + WIDTH // 2) % WIDTH
    inside = (row < rows)[:, None] & (element < WIDTH)
    token, head = row // (HEADS + 2 * KV_HEADS), row % (HEADS + 2 * KV_HEADS)
    start, angle = row[:, None] * WIDTH, token[:, None] * WIDTH
    raw = tl.load(x + start + element, mask=inside, other=0.0)
    value = raw.to(tl.float32)
    swapped = tl.load(x + start + other, mask=inside, other=0.0).to(tl.float32)
    if q_weight is not None:
        inverse, asks = _inverse_rms(value, epsilon, WIDTH)[:, None], (head < HEADS)[:, None]
        value = _scaled(value, inverse, asks, q_weight, k_weight, element, WIDTH, raw.dtype)
        swapped = _scaled(swapped, inverse, asks, q_weight, k_weight, other, WIDTH, raw.dtype)
    cos = tl.load(cosine + angle + element, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sine + angle + element, mask=inside, other=0.0).to(tl.float32)
    turned = tl.fma(value, cos, swapped * sin).to(raw.dtype)
    at = (token * HEADS + head)[:, None] * WIDTH + element
    tl.store(out + at, turned, mask=inside & (head < HEADS)[:, None])
    slot = tl.load(slots + token, mask=(token < new) & (row < rows), other=-1)
    page, place, kv_head = slot // PAGE, slot % PAGE, (head - HEADS) % KV_HEADS
    kept, is_key = inside & (slot >= 0)[:, None], (head < HEADS + KV_HEADS)[:, None]
    at = (page * keys_page + kv_head * keys_head + place * keys_token)[:, None] + element
    tl.store(keys + at, turned, mask=kept & is_key & (head >= HEADS)[:, None])
    at = (page * values_page + kv_head * values_head + place * values_token)[:, None] + element
    tl.store(values + at, raw, mask=kept & (head >= HEADS + KV_HEADS)[:, None])


@triton.jit
def _scaled(value, inverse, asks, q_weight, k_weight, at, WIDTH: tl.constexpr, dtype):
    """Compute the norm of queries, where `asks`, and of keys, rounded as a norm is stored."""
    of_q = tl.load(q_weight + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    of_k = tl.load(k_weight + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    return (value * inverse * tl.where(asks, of_q, of_k)).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def swiglu_kernel(x, out, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK elements of silu(gate) * up of x [rows, 2 * WIDTH] = (gate, up)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows.to(tl.int64) * WIDTH
    place = at // WIDTH * 2 * WIDTH + at % WIDTH
    gate = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = swiglu_of(gate, up)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def swiglu_backward_kernel(x, above, grad_x, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the gradients of BLOCK pairs of gate and up into grad_x [rows, 2 * WIDTH]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows.to(tl.int64) * WIDTH
    place = at // WIDTH * 2 * WIDTH + at % WIDTH
    gate = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(above + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_x + place, grad_gate.to(grad_x.dtype.element_ty), mask=inside)
    grad_up = grad * gate * sigmoid
    tl.store(grad_x + place + WIDTH, grad_up.to(grad_x.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Norm x [T, D] or [T, n, D] by the root of its mean square, times weight [D]."""
    return _RMSNorm.apply(x, None, weight, epsilon)[1]  # type: ignore[no-any-return]


def add_rms_norm(
    x: Tensor, change: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Compute x + change [T, D] and its RMSNorm."""
    return _RMSNorm.apply(x, change, weight, epsilon)  # type: ignore[no-any-return]


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Compute x * cosine + (x with its halves swapped) * sine of x [T, n, E].

    cosine and sine are [T, 1, E] and get no gradient.
    """
    return _Rotate.apply(x, cosine, sine)  # type: ignore[no-any-return]


def swiglu(x: Tensor) -> Tensor:
    """Compute silu(gate) * up [N, I] of x [N, 2I] = (gate, up)."""
    return _SwiGLU.apply(x)  # type: ignore[no-any-return]


def turn_heads(
    x: Tensor,
    norms: Sequence[Any],
    rotation: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """Norm and rotate the queries and keys of x [T, H + 2K, E] = (q, k, v), with the bits of
    `rms_norm` and `rotate`; keys and values go into pages as by `write_cache`.

    norms: modules of the norms of queries and keys, or none. Returns the queries [T, H, E].
    """
    need_contiguous_rows(keys, values)
    (tokens, heads, width), kv_heads = x.shape, keys.shape[1]
    rows, shape = _rows(x)
    out = x.new_empty(tokens, heads - 2 * kv_heads, width)
    weights = [norm.weight for norm in norms] or [None, None]
    heads_kernel[(triton.cdiv(rows, shape["ROWS"]),)](
        *(_aligned(x.contiguous()), *weights, *(side.contiguous() for side in rotation)),
        *(slots, out, keys, values, rows, len(slots)),
        norms[0].variance_epsilon if norms else 0.0,
        *(*keys.stride()[:3], *values.stride()[:3]),
        HEADS=out.shape[1],
        KV_HEADS=kv_heads,
        PAGE=keys.shape[2],
        **shape,
        num_warps=_warps(shape["BLOCK"]),
    )
    return out


class _RMSNorm(torch.autograd.Function):
    """Autograd function (x, change, weight) -> (x + change, its norm), None without a change."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, change: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor | None, Tensor]:
        x, out = _aligned(x), _new(x)
        total = None if change is None else _new(x)
        rows, shape = _rows(x)
        rms_norm_kernel[(triton.cdiv(rows, shape["ROWS"]),)](
            x,
            None if change is None else _aligned(change.contiguous()),
            weight,
            total,
            out,
            rows,
            *_layout(x),
            epsilon,
            **shape,
            num_warps=_warps(shape["BLOCK"]),
        )
        ctx.save_for_backward(x if total is None else total, weight)
        ctx.epsilon = epsilon
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (above_total, above) = ctx.saved_tensors, grads
        rows, shape = _rows(x)
        programs = min(triton.cdiv(rows, shape["ROWS"]), WEIGHT_PARTS)
        parts = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
        grad_x = _new(x)
        fused = above_total is not None
        rms_norm_backward_kernel[(programs,)](
            x,
            weight,
            above.contiguous(),
            above_total.contiguous() if fused else None,
            grad_x,
            parts,
            rows,
            *_layout(x),
            ctx.epsilon,
            **shape,
            num_warps=_warps(shape["BLOCK"]),
        )
        # float32, which a parameter with a master keeps (trainer/optimizer.py)
        return grad_x, grad_x if fused else None, parts.sum(0), None


class _Rotate(torch.autograd.Function):
    """Autograd function of `rotate`; its backward is the transposed rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _rotate(grads[0].contiguous(), *ctx.saved_tensors, backward=True), None, None


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, backward: bool) -> Tensor:
    out, (rows, shape) = _new(x), _rows(x)
    rotate_kernel[(triton.cdiv(rows, shape["ROWS"]),)](
        x,
        cosine.contiguous(),
        sine.contiguous(),
        out,
        rows,
        *_layout(x),
        BACKWARD=backward,
        **shape,
        num_warps=_warps(shape["BLOCK"]),
    )
    return out


class _SwiGLU(torch.autograd.Function):
    """Autograd function of `swiglu`; it keeps x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        out = x.new_empty(len(x), x.shape[1] // 2)
        swiglu_kernel[(triton.cdiv(out.numel(), TILE),)](
            x, out, len(x), WIDTH=out.shape[1], BLOCK=TILE, num_warps=4
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,), above = ctx.saved_tensors, grads[0].contiguous()
        grad_x = torch.empty_like(x)
        swiglu_backward_kernel[(triton.cdiv(above.numel(), TILE),)](
            x, above, grad_x, len(x), WIDTH=above.shape[1], BLOCK=TILE, num_warps=4
        )
        return grad_x


def _new(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _aligned(x: Tensor) -> Tensor:
    """Copy x unless it begins at a multiple of 16 bytes.

    Triton lays out a row by the alignment of its address, and so orders its sum.
    """
    return x.clone() if x.data_ptr() % 16 else x


def _rows(x: Tensor) -> tuple[int, dict[str, int]]:
    """Count x's rows, and choose the tile: so many rows of BLOCK elements a program."""
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    return x.numel() // width, {"WIDTH": width, "BLOCK": block, "ROWS": max(1, TILE // block)}


def _layout(x: Tensor) -> tuple[int, int, int]:
    """Return (rows of a token, stride of tokens, stride of a token's rows) of [T, D] or [T, n,
    D]."""
    need_contiguous_rows(x)
    return (1, x.stride(0), 0) if x.dim() == 2 else (x.shape[1], x.stride(0), x.stride(1))


def _warps(block: int) -> int:
    return 4 if block <= 4096 else 8
