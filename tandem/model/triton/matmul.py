"""Batch-invariant matmul in Triton: a row's output bits do not depend on other rows.

Tile shapes are constants, so one row and ten thousand take the same matrix instruction, and a sum
runs over the inputs in ascending order. Two kernels walk the tiles: `matmul_kernel` has a program
for each, `persistent_matmul_kernel` one program for each multiprocessor, which walks many, and
reads them through pointers or through Hopper's tensor memory accelerator (TMA). Both make a tile by
one function, `_product`. Kernels run on the current CUDA device, or on the CPU in Triton's
interpreter if TRITON_INTERPRET=1 was set before triton was imported.
"""

# Code that @triton.jit compiles is not typed Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# rows, outputs and inputs of a tile; 64 rows are what Hopper's wgmma takes
MATMUL_TILE = tl.constexpr(64)
# row tiles that read the weight together while it is in the L2 cache
ROW_GROUP = tl.constexpr(8)


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
def _load_tile(matrix, row, column, rows, columns, stride):
    """Load a tile of a matrix [rows, columns] from (row, column), with zeros outside."""
    row = (row + tl.arange(0, MATMUL_TILE)).to(tl.int64)
    column += tl.arange(0, MATMUL_TILE)
    inside = (row < rows)[:, None] & (column < columns)
    return tl.load(matrix + row[:, None] * stride + column, mask=inside, other=0.0)


@triton.jit
def _product(
    x, weight, bias, out, row, output, rows, outputs, inputs, x_row, weight_row, TMA: tl.constexpr
):
    """Compute the tile of out [rows, outputs] from (row, output).

    With TMA x and weight are descriptors.
    """
    acc = tl.zeros([MATMUL_TILE, MATMUL_TILE], tl.float32)
    for base in range(0, inputs, MATMUL_TILE):
        if TMA:
            a, b = x.load([row, base]), weight.load([output, base])
        else:
            a = _load_tile(x, row, base, rows, inputs, x_row)
            b = _load_tile(weight, output, base, outputs, inputs, weight_row)
        acc = dot(a, tl.trans(b), acc)
    row = (row + tl.arange(0, MATMUL_TILE)).to(tl.int64)
    output += tl.arange(0, MATMUL_TILE)
    if bias is not None:
        acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
    inside = (row < rows)[:, None] & (output < outputs)
    tl.store(out + row[:, None] * outputs + output, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(x, weight, bias, out, rows, outputs, inputs, x_row, weight_row):
    """Compute one tile of out [rows, outputs]."""
    row_tile, output_tile = tl.swizzle2d(
        tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), ROW_GROUP
    )
    row, output = row_tile * MATMUL_TILE, output_tile * MATMUL_TILE
    _product(x, weight, bias, out, row, output, rows, outputs, inputs, x_row, weight_row, TMA=False)


@triton.jit(do_not_specialize=["rows"])
def persistent_matmul_kernel(
    x, weight, bias, out, rows, outputs, inputs, x_row, weight_row, TMA: tl.constexpr
):
    """Compute every n-th tile of out [rows, outputs], n being the number of programs."""
    row_tiles, output_tiles = tl.cdiv(rows, MATMUL_TILE), tl.cdiv(outputs, MATMUL_TILE)
    if TMA:
        left = tl.make_tensor_descriptor(x, [rows, inputs], [x_row, 1], [MATMUL_TILE, MATMUL_TILE])
        right = tl.make_tensor_descriptor(
            weight, [outputs, inputs], [weight_row, 1], [MATMUL_TILE, MATMUL_TILE]
        )
    else:
        left, right = x, weight
    for number in range(tl.program_id(0), row_tiles * output_tiles, tl.num_programs(0)):
        row_tile, output_tile = tl.swizzle2d(
            number // output_tiles, number % output_tiles, row_tiles, output_tiles, ROW_GROUP
        )
        row, output = row_tile * MATMUL_TILE, output_tile * MATMUL_TILE
        _product(
            left, right, bias, out, row, output, rows, outputs, inputs, x_row, weight_row, TMA=TMA
        )


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, kernel: str = "plain") -> Tensor:
    """Multiply x [N, I] with weight [O, I], plus bias [O], to [N, O] of their common dtype.

    Sums are float32. Every kernel sums the same tiles in the same order. "persistent" starts one
    program for each multiprocessor; "tma" does too, and reads through tensor descriptors where
    addresses and row strides are multiples of 16 bytes.
    """
    need_contiguous_rows(x, weight)
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = x.new_empty(rows, outputs)
    row_tiles = triton.cdiv(rows, MATMUL_TILE.value)
    output_tiles = triton.cdiv(outputs, MATMUL_TILE.value)
    arguments = x, weight, bias, out, rows, outputs, inputs, x.stride(0), weight.stride(0)
    options = {"num_warps": 4, "num_stages": 3}
    if kernel == "plain":
        matmul_kernel[output_tiles, row_tiles](*arguments, **options)
        return out
    # tensor descriptors want addresses and rows of whole 16 bytes
    whole = not any(t.data_ptr() % 16 or t.stride(0) * t.element_size() % 16 for t in (x, weight))
    if tma := kernel == "tma" and whole:
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


def need_contiguous_rows(*tensors: Tensor) -> None:
    for t in tensors:
        if t.stride(-1) != 1:
            found = f"a tensor {tuple(t.shape)} has strides {t.stride()}"
            raise ValueError(f"{found}, expected 1 in the last dimension")
