"""RMSNorm, rotary embedding and SwiGLU in Triton, forward and backward, float32 inside.

A program owns whole rows, and how many follows from their width alone, so a row's bits do not
depend on other rows. The one sum over rows, the gradient of a norm's weight, runs in an order that
depends on their number only. `rowwise.py` launches the kernels.
"""

# Code that @triton.jit compiles is not typed Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


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
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
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


@triton.jit(do_not_specialize=["rows"])
def swiglu_kernel(x, out, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK elements of silu(gate) * up of x [rows, 2 * WIDTH] = (gate, up)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows.to(tl.int64) * WIDTH
    place = at // WIDTH * 2 * WIDTH + at % WIDTH
    gate = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
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
