"""Row counts of bfloat16 products in AMX tiles: those that give a row the same bits."""

from functools import cache

import torch

PACK_ROWS_HINT = 32  # the row count that weights are packed for
TILE_ROWS = 32  # rows of a bfloat16 product
_MANY_ROWS = (2048, 1024, 512, 256, 128, 64)  # those that may have the same bits


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
