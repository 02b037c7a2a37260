"""oneDNN's operators on a CPU: what there is of them, and the products of gradients by them.

Gradients need determinism, not batch invariance: the same bits twice, with any number of threads.
torch's own matmul is MKL's, which multiplies at half the speed on AMD processors with AVX-512
(docs/concepts/exactness.md). oneDNN may divide a long sum among threads, one of many more
than LONGEST terms, of bfloat16 of more than TILE_TERMS: such a sum is made of several. It copies a
slice of columns a number at a time: blocks of rows are made dense first. It compiles a kernel for
each row count, about 0.6 MB: rows are rounded to few counts (runtime/numerics.py).
"""

import os
import re
from functools import cache, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

# The one place that looks for private PyTorch operators.
HAS_PREPACKED = torch.backends.mkldnn.is_available() and hasattr(
    torch.ops.mkldnn, "_linear_pointwise"
)
LONGEST = 4096  # terms of a sum; with 49,152 and few outputs bits depend on the threads
PACK_ROWS_HINT = 32  # the row count that weights are packed for
TILE_ROWS = 32  # rows of a bfloat16 product, whole tiles of AMX
_MANY_ROWS = (2048, 1024, 512, 256, 128, 64)  # those that may have the same bits
TILE_TERMS = 256  # of a bfloat16 sum: of more, for few outputs, threads take a part each in AMX
ROWS, FEW_ROWS = 1024, 64  # rows of a product summed over rows; the last has a multiple of FEW_ROWS
OUTPUTS = 4096  # rows of a product that is added to a total: it is small beside the total
GPU_OUTPUTS = 1 << 15  # on a GPU, which few rows leave idle


@cache
def bfloat16_unit() -> str:
    """Name the unit that multiplies bfloat16 here, for oneDNN too: "tiles" (AMX), "pairs" of terms
    (AVX512_BF16), or "" for none."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper() * HAS_PREPACKED
    if torch.cpu._is_amx_tile_supported() and re.search("ALL|DEFAULT|AMX", limit):
        return "tiles"
    has_pairs = torch.cpu._is_avx512_bf16_supported()
    return "pairs" if has_pairs and re.search("ALL|DEFAULT|AMX|16|AVX10", limit) else ""


def in_float32(t: Tensor) -> bool:
    """Tell whether products with t, bfloat16, run in float32: not where a unit has them."""
    return not (t.is_cuda or bfloat16_unit())


def pack_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of a parameter in a pack of weights of that type, on a CPU."""
    return dtype.itemsize if bfloat16_unit() else 4


def padded_rows(rows: int, dtype: torch.dtype = torch.float32) -> int:
    """Round up to one of few row counts, each of which needs kernels of its own.

    It is a multiple of 4, coarser for many rows: at most 1/16 too many beyond 64. bfloat16 has
    whole tiles.
    """
    if dtype != torch.float32:
        return rows + -rows % TILE_ROWS
    step = max(4, (1 << rows.bit_length()) // 32)
    return rows + -rows % step


def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [N, K] with b [K, M] of the same type, with one set of bits for any number of
    threads: bfloat16 products of TILE_TERMS terms are summed in float32, in their order."""
    if b.dtype == torch.float32 or b.is_cuda or len(b) <= TILE_TERMS:
        return a @ b
    total = a.new_zeros((len(a), b.shape[1]), dtype=torch.float32)
    for part, own in zip(a.split(TILE_TERMS, 1), b.split(TILE_TERMS), strict=True):
        total += part @ own
    return total.to(b.dtype)


def gradient_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [N, K] with b [K, M] for a gradient.

    Both are rounded to b's type, and the product has it too; where no unit multiplies bfloat16 it
    is float32. N may be any number: it is rounded up to one of few (`padded_rows`).
    """
    if b.dtype != torch.float32:
        if not in_float32(b):
            return product(a.to(b.dtype), b)
        a, b = a.float(), b.float()
    if not HAS_PREPACKED or b.is_cuda or 0 in (*a.shape, *b.shape):
        return a @ b
    rows = len(a)
    if missing := padded_rows(rows) - rows:
        a = F.pad(a, (0, 0, 0, missing))
    multiply = torch.ops.mkldnn._linear_pointwise
    pairs = zip(a.split(LONGEST, 1), b.split(LONGEST), strict=True)
    products = (multiply(part, own.t(), None, "none", [], "") for part, own in pairs)
    return reduce(Tensor.add_, products)[:rows]


def weight_gradient(above: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
    """Multiply above [N, O], transposed, with x [N, I] to [O, I]: a sum over rows, as
    gradient_product.

    total, float32 [O, I]: the product is added to it in place.
    """
    if total is not None:
        outputs = GPU_OUTPUTS if x.is_cuda else OUTPUTS
        for part, own in zip(above.split(outputs, 1), total.split(outputs), strict=True):
            if x.is_cuda:  # to float32: products of chunks add up unrounded
                own += torch.mm(part.to(x.dtype).t(), x, out_dtype=torch.float32)
            else:
                own += weight_gradient(part, x)
        return total
    in_tiles = x.dtype != torch.float32 and not in_float32(x)
    if x.is_cuda or not HAS_PREPACKED or in_tiles or not len(x):
        return gradient_product(above.t(), x)
    turned = above.shape[1] > x.shape[1]  # oneDNN copies the first factor: the narrower of the two
    above = above.to(x.dtype)
    first, second = (x, above) if turned else (above, x)
    pairs = zip(first.split(ROWS), second.split(ROWS), strict=True)
    products = (gradient_product(_dense(part).t(), _dense(own)) for part, own in pairs)
    product = reduce(Tensor.add_, products)
    return product.t() if turned else product


def _dense(rows: Tensor) -> Tensor:
    missing = -len(rows) % FEW_ROWS
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows.contiguous()


@cache
def tile_sizes(rows: int, inputs: int, outputs: int, threads: int) -> list[int]:
    """Split a bfloat16 product of so many rows, a multiple of TILE_ROWS, into products with the
    bits of TILE_ROWS rows each."""
    sizes = []
    for many in _MANY_ROWS:
        if rows >= many and _same_bits(many, inputs, outputs, threads):
            sizes += [many] * (rows // many)
            rows %= many
    return sizes + [TILE_ROWS] * (rows // TILE_ROWS)


@cache
def _same_bits(rows: int, inputs: int, outputs: int, threads: int) -> bool:
    """Try whether a bfloat16 product of so many rows has the bits of TILE_ROWS rows at a time. The
    kernel that oneDNN takes depends on the shape and the threads alone."""
    random = torch.Generator().manual_seed(0)
    weight, x = (
        torch.randn(shape, generator=random).bfloat16()
        for shape in ((outputs, inputs), (rows, inputs))
    )
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS_HINT)
    run = torch.ops.mkldnn._linear_pointwise
    tiles = [run(part, packed, None, "none", [], "") for part in x.split(TILE_ROWS)]
    return torch.equal(run(x, packed, None, "none", [], ""), torch.cat(tiles))
