"""Boxes: the part of a whole tensor that a process or a file holds.

A part is known by its box alone, so checkpoints, exports and the weights of an engine do not depend
on how a mesh divides a model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor. Example: rows 4 .. 7 of a weight [8, 6]: Box((4, 0), (4, 6), (8, 6))"""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def cut(self, dim: int, number: int, count: int) -> "Box":
        """Return part `number` of `count` equal ones along a dimension."""
        start, shape = list(self.start), list(self.shape)
        shape[dim] //= count
        start[dim] += number * shape[dim]
        return Box(tuple(start), tuple(shape), self.whole)

    @property
    def size(self) -> int:
        """Count the elements of the part."""
        return math.prod(self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        """Return the part of the tensor in both boxes, None if there is none."""
        start = tuple(map(max, self.start, other.start))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        shape = tuple(end - a for a, end in zip(start, ends, strict=True))
        return None if any(n <= 0 for n in shape) else Box(start, shape, self.whole)

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds the box `outer`."""
        return tuple(
            slice(a - b, a - b + n)
            for a, n, b in zip(self.start, self.shape, outer.start, strict=True)
        )


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape), tuple(shape))
