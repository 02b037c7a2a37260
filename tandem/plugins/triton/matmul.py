"""Batch-invariant matmul in Triton: a row's output bits do not depend on other rows.

A tile of the product may have any size of `TILES`: the sum of an output runs over the inputs in
ascending order, in blocks of BLOCK_K, in each of them. So a tile is chosen by the shape, small ones
for few rows and large ones for many. A program for each multiprocessor, or a few, walks the tiles
and reads them through pointers or through Hopper's tensor memory accelerator (TMA). Kernels run on
the current CUDA device, or on the CPU in Triton's interpreter if TRITON_INTERPRET=1 was set before
triton was imported.
"""

# Code that @triton.jit compiles is not typed Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
BLOCK_K = tl.constexpr(64)  # inputs of a tile: the order of every sum
# row tiles that read the weight together while it is in the L2 cache
ROW_GROUP = tl.constexpr(8)


class Tile(NamedTuple):
    """A tile of a product: its rows and outputs; how a program runs it; and how many programs a
    multiprocessor has room for."""

    rows: int
    outputs: int
    warps: int
    stages: int
    programs: int


PLAIN = Tile(64, 64, 4, 3, 1)  # 64 rows are what Hopper's wgmma takes
# the largest first
TILES = (
    Tile(128, 256, 8, 3, 1),
    Tile(128, 128, 8, 4, 1),
    Tile(64, 64, 4, 4, 2),
    Tile(64, 32, 4, 6, 3),
)


def tile_of(rows: int, outputs: int, itemsize: int, processors: int) -> Tile:
    """Choose the tile of a product [rows, outputs]: the largest one that is half full of rows and
    keeps three of four multiprocessors busy.

    itemsize: bytes of an input; float32 has no matrix instruction that is exact, and a small tile.
    """
    for tile in TILES[:-1] if itemsize < 4 else ():
        count = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
        if 2 * rows > tile.rows and 4 * count >= 3 * processors:
            return tile
    return TILES[-1] if itemsize < 4 else PLAIN


@triton.jit
def dot(a, b, acc):
    """Compute a @ b + acc in float32, without TF32."""
    # the interpreter's own product is NumPy's: it takes bfloat16 for integers, and on processors
    # without AVX-512 its BLAS gives a row other bits at another place in the tile
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
        return acc + tl.sum(a[:, :, None] * b[None, :, :], 1)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def add(a, b):
    """Compute a + b of their type with the bits of torch's sum."""
    total = a.to(tl.float32) + b.to(tl.float32)
    if INTERPRETED and a.dtype == tl.bfloat16:  # the interpreter's own cast cuts the bits off
        bits = total.to(tl.int32, bitcast=True)
        bits = tl.where(total == 0.0, bits, bits + 0x7FFF + ((bits >> 16) & 1))
        total = bits.to(tl.float32, bitcast=True)
    return total.to(a.dtype)


@triton.jit
def swiglu_of(gate, up):
    """Compute silu(gate) * up, float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _load_tile(matrix, row, column, rows, columns, stride, ROWS: tl.constexpr, TMA: tl.constexpr):
    """Load ROWS x BLOCK_K of a matrix [rows, columns] from (row, column), with zeros outside; with
    TMA it is a descriptor."""
    if TMA:
        tile = matrix.load([row, column])
    else:
        row = (row + tl.arange(0, ROWS)).to(tl.int64)
        column += tl.arange(0, BLOCK_K)
        inside = (row < rows)[:, None] & (column < columns)
        tile = tl.load(matrix + row[:, None] * stride + column, mask=inside, other=0.0)
    return tile


@triton.jit
def _rounded(acc, bias, output, outputs, dtype):
    """Add the bias [outputs], which may be None, to sums of outputs, and round them."""
    if bias is not None:
        acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
    return acc.to(dtype)


@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    rows,
    outputs,
    inputs,
    x_row,
    weight_row,
    GATED: tl.constexpr,
    TMA: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Compute every n-th tile of out [rows, outputs], n being the number of programs.

    GATED: of silu(gate) * up, of a weight [2 * outputs, inputs] of gate and up.
    """
    row_tiles, output_tiles = tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUTPUTS)
    all_outputs = outputs * 2 if GATED else outputs
    dtype = out.dtype.element_ty
    if TMA:
        left = tl.make_tensor_descriptor(x, [rows, inputs], [x_row, 1], [ROWS, BLOCK_K])
        right = tl.make_tensor_descriptor(
            weight, [all_outputs, inputs], [weight_row, 1], [OUTPUTS, BLOCK_K]
        )
    else:
        left, right = x, weight
    for number in range(tl.program_id(0), row_tiles * output_tiles, tl.num_programs(0)):
        row_tile, output_tile = tl.swizzle2d(
            number // output_tiles, number % output_tiles, row_tiles, output_tiles, ROW_GROUP
        )
        row, output = row_tile * ROWS, output_tile * OUTPUTS
        acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
        up = acc
        for base in range(0, inputs, BLOCK_K):
            a = _load_tile(left, row, base, rows, inputs, x_row, ROWS, TMA)
            b = _load_tile(right, output, base, all_outputs, inputs, weight_row, OUTPUTS, TMA)
            acc = dot(a, tl.trans(b), acc)
            if GATED:
                b = _load_tile(
                    right, outputs + output, base, all_outputs, inputs, weight_row, OUTPUTS, TMA
                )
                up = dot(a, tl.trans(b), up)
        place, own = (row + tl.arange(0, ROWS)).to(tl.int64), output + tl.arange(0, OUTPUTS)
        inside = (place < rows)[:, None] & (own < outputs)
        at = place[:, None] * outputs + own
        result = _rounded(acc, bias, own, outputs, dtype)
        if GATED:
            up = _rounded(up, bias, outputs + own, all_outputs, dtype)
            result = swiglu_of(result.to(tl.float32), up.to(tl.float32)).to(dtype)
        if residual is not None:
            result = add(tl.load(residual + at, mask=inside, other=0.0), result)
        tl.store(out + at, result, mask=inside)


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    kernel: str = "plain",
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """Multiply x [N, I] with weight [O, I], plus bias [O], to [N, O] of their common dtype.

    Sums are float32. Every kernel sums the same inputs in the same order. "plain" takes one tile
    for all shapes; "persistent" and "tma" take one by `tile_of`, unless it is given, and "tma"
    reads through tensor descriptors where addresses and row strides are multiples of 16 bytes.
    residual [N, O] is added to the rounded product; gated: silu(gate) * up [N, O / 2] of products
    (gate, up). Both have the bits of the operators one after another.
    """
    need_contiguous_rows(x, weight)
    (rows, inputs), outputs = x.shape, weight.shape[0] // (1 + gated)
    residual = None if residual is None else residual.contiguous()
    out, processors = x.new_empty(rows, outputs), _processors(x.device)
    if kernel == "plain":
        tile = tile or PLAIN
    tile = tile or tile_of(rows, len(weight), x.element_size(), processors)
    wide = tile.outputs // (1 + gated)  # two sums have the registers of one
    # tensor descriptors want addresses and rows of whole 16 bytes
    whole = not any(t.data_ptr() % 16 or t.stride(0) * t.element_size() % 16 for t in (x, weight))
    if tma := kernel == "tma" and whole:
        triton.set_allocator(partial(_descriptor_memory, x.device))
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, wide)
    programs = tiles if kernel == "plain" else min(processors * tile.programs, tiles)
    matmul_kernel[(programs,)](
        *(x, weight, bias, residual, out, rows, outputs, inputs, x.stride(0), weight.stride(0)),
        GATED=gated,
        TMA=tma,
        ROWS=tile.rows,
        OUTPUTS=wide,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
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


def need_contiguous_rows(*tensors: Tensor) -> None:
    for t in tensors:
        if t.stride(-1) != 1:
            found = f"a tensor {tuple(t.shape)} has strides {t.stride()}"
            raise ValueError(f"{found}, expected 1 in the last dimension")
