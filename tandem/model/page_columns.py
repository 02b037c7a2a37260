"""Page columns of paged attention: a page that several sequences have in common is read once.

Column c is page c of every sequence of a bucket. The samples of a prompt share its pages, and stand
beside each other. Their queries are then rows of one tile, which multiplies the page once. A row
has the same bits for any rows beside it (attention.py, rule 1), so tiles change time and no result.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.model.attention import QUERY_BLOCK

Product = Callable[[Tensor, Tensor], Tensor]

# Rows whose products take as long as reading the page: 20 (heads of 16) to 48 (of 64, from memory)
# on an Intel Xeon with AVX-512.
PAGE_ROWS = 32
# Tiles must save this share of that time, as their rows are copied in and out.
LEAST_SAVED = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A page of each of m sequences, read once for `width` sequences.

    Example, sequences 0 to 2 with page 7 and sequence 3 with page 9: Column(sequences=4, used=128,
    pages=tensor([7, 9]), width=3, members=tensor([0, 1, 2, 3, 3, 3]), places=tensor([0, 1, 2, 3]))
    """

    sequences: int  # m, the first ones of the bucket
    used: int  # keys of a page that are read, a multiple of 16
    pages: slice | Tensor  # int64 [tiles], the page of each tile; a slice if they are consecutive
    width: int  # sequences of a tile
    # int64 [tiles * width], sequence at each place, padding repeats a tile's last; None: in order
    members: Tensor | None = None
    places: Tensor | None = None  # int64 [m], place of each sequence; None: in order

    def multiply(self, product: Product, rows: Tensor, cache: Tensor) -> Tensor:
        """Multiply rows [n, K, R, x] with the column's pages of a cache [P, K, PAGE, E], in
        float32: [m, K, R, y].

        product: `query_key` for queries and keys, [m, K, R, used]; `torch.matmul` for probabilities
        [n, K, R, used] and values, [m, K, R, E].
        """
        cache, pages = cache[:, :, : self.used], self.pages
        # consecutive pages are read in place
        read = cache[pages] if isinstance(pages, slice) else cache.index_select(0, pages)
        if self.width == 1:
            return product(rows[: self.sequences], read.float())
        at = self.members
        rows = rows[: self.sequences] if at is None else rows.index_select(0, at)
        # to tiles [tiles, K, width * R, x], and back to the sequences' rows [m, K, R, y]
        tiles = rows.unflatten(0, (-1, self.width)).transpose(1, 2).flatten(2, 3)
        found = product(tiles, read.float()).unflatten(2, (self.width, -1))
        found = found.transpose(1, 2).flatten(0, 1)
        return found if self.places is None else found.index_select(0, self.places)


def column_of(pages: np.ndarray, used: int, rows: int) -> Column:
    """Plan the column of pages int64 [m], where each sequence has that many rows (a multiple of
    4)."""
    sequences, members, places = len(pages), None, None
    firsts = np.flatnonzero(np.diff(pages, prepend=-1))  # where another page begins
    counts = np.diff(firsts, append=sequences)
    width = _width(counts, rows) if len(counts) < sequences else 1
    if width > 1:
        tiles = -(-counts // width)
        total, pages = width * tiles.sum(), pages[firsts].repeat(tiles)
        if total > sequences:  # else they are in order
            moved = width * (np.cumsum(tiles) - tiles) - firsts  # padding before a group's first
            at = np.arange(sequences) + moved.repeat(counts)
            # the sequence at each place, in padding the last one before it
            members = torch.from_numpy(np.searchsorted(at, np.arange(total), side="right") - 1)
            places = torch.from_numpy(at)
    first, is_run = int(pages[0]), bool((np.diff(pages) == 1).all())
    return Column(
        sequences=sequences,
        used=used,
        pages=slice(first, first + len(pages)) if is_run else torch.from_numpy(pages),
        width=width,
        members=members,
        places=places,
    )


def _width(counts: np.ndarray, rows: int) -> int:
    """Choose how many sequences share a tile; counts int64: neighbours with a page in common.

    A tile takes the time of its page and of its rows, padding included. 1 if that saves little.
    """
    widths = np.unique(np.minimum(counts, max(1, QUERY_BLOCK // rows)))
    seconds = -(-counts[:, None] // widths).sum(0) * (PAGE_ROWS + rows * widths)
    best = seconds.argmin()
    alone = counts.sum() * (PAGE_ROWS + rows)
    return int(widths[best]) if seconds[best] <= (1 - LEAST_SAVED) * alone else 1
