"""Parts of the weights that each process holds, as boxes of the whole tensors; sums and copies of
whole tensors made of them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tandem.model.boxes import Box, whole_box
from tandem.trainer.optimizer import Whole, row_squares
from tandem.trainer.parallel.mesh import Group

BUCKET_BYTES = 64 << 20  # of parts that are collected at once

T = TypeVar("T")


def box_of(parameter: nn.Parameter, outer: Box | None) -> Box:
    """Return the box of a parameter's part. outer: the part of the tensor that the parameter is
    before FSDP divides it; None: all of it."""
    outer = outer or whole_box(parameter.shape)
    if not isinstance(parameter.data, DTensor):
        return outer
    data = parameter.data
    shape, offset = compute_local_shape_and_global_offset(
        data.shape, data.device_mesh, data.placements
    )
    start = tuple(a + b for a, b in zip(outer.start, offset, strict=True))
    return Box(start, tuple(shape), outer.whole)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def buckets(sizes: Mapping[T, int], most: int) -> Iterator[list[T]]:
    """Yield things in lists whose sizes are together at most `most`, or of one that is more."""
    bucket, total = list[T](), 0
    for thing, size in sizes.items():
        if bucket and total + size > most:
            yield bucket
            bucket, total = [], 0
        bucket.append(thing)
        total += size
    if bucket:
        yield bucket


def cut_rows(box: Box, most: int) -> Iterator[Box]:
    """Yield a box in blocks of rows of at most `most` numbers, or of one row that is more."""
    rows = max(1, most * box.shape[0] // box.size)
    for first in range(0, box.shape[0], rows):
        start, shape = (box.start[0] + first, *box.start[1:]), min(rows, box.shape[0] - first)
        yield Box(start, (shape, *box.shape[1:]), box.whole)


class Pieces(Whole):
    """The parts of all processes of a model's parameters. Making it, and every method, is a
    collective of all processes.

    Of equal parts the process with the lowest rank has the one that counts. dtype: that parts are
    rounded to before they run.
    """

    own: dict[str, Box]

    def __init__(self, own: Mapping[str, Box], world: Group, dtype: torch.dtype):
        self.own, self.world, self.dtype = dict(own), world, dtype
        self.boxes: list[dict[str, Box]] = world.gather(self.own, "boxes of weights")  # by rank
        self.owners: dict[str, dict[Box, int]] = {}  # by name, in the order of the boxes
        for rank, boxes in enumerate(self.boxes):
            for name, box in boxes.items():
                if math.prod(box.shape):
                    self.owners.setdefault(name, {}).setdefault(box, rank)

    def counted(self, name: str) -> bool:
        return self.owners[name].get(self.own[name]) == self.world.rank

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Compute the L2 norm over whole gradients, from parts, in the order of names and rows:
        where only rows are divided, to the bits of `global_norm`."""
        named = {
            name: (gradient, self.own[name].whole[0])
            for name, gradient in gradients.items()
            if self.counted(name) and gradient.numel()
        }
        squares = dict(zip(named, row_squares(named.values()), strict=True))
        found = self.world.gather(squares, "norm of the gradients")
        total = 0.0
        for name, boxes in self.owners.items():
            parts = [(box, found[rank].get(name)) for box, rank in boxes.items()]
            there = [(box, part) for box, part in parts if part is not None]
            if not there:  # a frozen weight has no gradient
                continue
            rows = there[0][0].whole[0]
            if rows == 1:
                total += float(sum(part.sum() for _, part in there))
                continue
            added = np.zeros(rows)
            for box, part in there:
                added[box.slices[0]] += part
            total += float(added.sum())
        return math.sqrt(total)

    def collect_parts(
        self,
        tensors: Mapping[str, Tensor],
        names: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Iterator[tuple[str, Box, Tensor]]:
        """Yield every tensor in blocks of rows on rank 0: its name, the box of a block, and the
        block; nothing on the others. All processes must go through to the end. names: by default
        all; dtype: to round each block to, by default none.

        Blocks come in buckets, one collective each, so neither messages nor the memory that they
        take grow with the tensors."""
        world, nothing = self.world, [0] * self.world.size
        dtype = dtype or next(iter(tensors.values())).dtype
        most = BUCKET_BYTES // dtype.itemsize
        blocks = {
            (name, block): rank
            for name in (self.owners if names is None else names)
            for box, rank in self.owners[name].items()
            for block in cut_rows(box, most)
        }

        def own(name: str, block: Box) -> Tensor:
            return tensors[name].detach()[block.within(self.own[name])].to(dtype)

        for bucket in buckets({key: key[1].size for key in blocks}, most):
            counts = list(nothing)  # numbers that each process sends
            sent = [torch.empty(0, dtype=dtype, device=world.device)]
            for key in bucket:
                if rank := blocks[key]:
                    counts[rank] += key[1].size
                    if rank == world.rank:
                        sent.append(own(*key).reshape(-1))
            received, here = torch.cat(sent), counts if world.rank == 0 else nothing
            if any(counts):
                there = [counts[world.rank], *nothing[1:]]
                received = world.exchange(received, bucket[0][0], there, here)
            if world.rank:
                continue
            left = list(received.split(here))  # by rank, its blocks behind each other
            for name, block in bucket:
                if not (rank := blocks[name, block]):
                    yield name, block, own(name, block)
                    continue
                yield name, block, left[rank][: block.size].view(block.shape)
                left[rank] = left[rank][block.size :]

    def map_whole(
        self, tensors: Mapping[str, Tensor], function: Callable[[str, Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield this process's part of function(name, whole tensor) for each name that any process
        has; the function maps the matrices of a tensor one by one, and keeps shapes.

        A process that holds whole matrices maps them itself. The others are sent to one process
        each, as many at a time as there are processes, largest first, and their results back: two
        collectives for each such round."""
        given = {name for names in self.world.gather(list(tensors), "names") for name in names}
        divided = []
        for name in (name for name in self.owners if name in given):
            if any(box.shape[-2:] != box.whole[-2:] for box in self.owners[name]):
                divided.append(name)
            elif name in tensors and tensors[name].numel():
                yield name, function(name, tensors[name])
        divided.sort(key=lambda name: -math.prod(next(iter(self.owners[name])).whole))
        for first in range(0, len(divided), self.world.size):
            yield from self._map_round(divided[first : first + self.world.size], tensors, function)

    def _map_round(
        self,
        names: list[str],
        tensors: Mapping[str, Tensor],
        function: Callable[[str, Tensor], Tensor],
    ) -> Iterator[tuple[str, Tensor]]:
        """Map the tensor of the i-th name on process i, from parts and back to parts."""
        nothing = torch.empty(0, device=self.world.device)
        idle = [nothing] * (self.world.size - len(names))
        counted = [name in tensors and self.counted(name) for name in names]
        sent = [tensors[n] if counts else nothing for n, counts in zip(names, counted, strict=True)]
        here, found = [nothing] * self.world.size, [nothing] * self.world.size
        if is_mapper := self.world.rank < len(names):
            name = names[self.world.rank]
            whole = torch.empty(next(iter(self.owners[name])).whole, device=self.world.device)
            for box, rank in self.owners[name].items():
                here[rank] = whole[box.slices]
        self.world.all_to_all(sent + idle, here, "whole matrices")
        if is_mapper:
            result, boxes = function(name, whole), [own.get(name) for own in self.boxes]
            found = [nothing if box is None else result[box.slices] for box in boxes]
        parts = [torch.empty_like(tensors[n]) if n in tensors else nothing for n in names] + idle
        self.world.all_to_all(found, parts, "whole matrices")
        yield from ((n, part) for n, part in zip(names, parts, strict=False) if n in tensors)
