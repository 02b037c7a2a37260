"""Tensors in memory that processes share: a file without a name, laid out the same way by whoever
knows the layout.

The file is a memfd on Linux and an unlinked temporary file elsewhere. It goes to another process as
a descriptor over a socket, and is gone with the last process that holds it, however that one ended.
Knows no versions (weights/shared.py does).
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: a cache line, and more than any type needs
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True, slots=True)
class Layout:
    """Which tensors lie one behind the other. Example: Layout((("lm_head.weight", "torch.float32",
    (97, 96)),))"""

    parts: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype, shape

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> "Layout":
        return cls(
            tuple(
                (name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()
            )
        )

    @classmethod
    def from_json(cls, parts: list[Any]) -> "Layout":
        """What became of `parts` in JSON, where tuples are lists."""
        return cls(tuple((name, dtype, tuple(shape)) for name, dtype, shape in parts))

    @property
    def size(self) -> int:
        """Bytes of all tensors, with what aligns them."""
        return sum(_aligned(prod(shape) * DTYPES[dtype].itemsize) for _, dtype, shape in self.parts)

    def views(self, memory: mmap.mmap) -> Iterator[tuple[str, Tensor]]:
        """The tensors, by name, as they lie in the memory: they keep it mapped."""
        at = 0
        for name, dtype, shape in self.parts:
            flat = torch.frombuffer(memory, dtype=DTYPES[dtype], count=prod(shape), offset=at)
            yield name, flat.view(shape)
            at += _aligned(flat.nbytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def write_tensors(layout: Layout, tensors: dict[str, Tensor]) -> int:
    """The descriptor of a new file that holds a copy of the tensors; the caller's to close."""
    if Layout.of(tensors) != layout:
        raise ValueError("the tensors are not those of the layout: other names, types or shapes")
    descriptor = _nameless_file(layout.size)
    for name, view in layout.views(mmap.mmap(descriptor, layout.size)):
        view.copy_(tensors[name])
    return descriptor


def read_tensors(layout: Layout, descriptor: int) -> dict[str, Tensor]:
    """The tensors of such a file, not copied; the descriptor may be closed afterwards.

    Whoever writes into one writes into pages of their own, which nobody else sees.
    """
    return dict(layout.views(mmap.mmap(descriptor, layout.size, access=mmap.ACCESS_COPY)))


def _nameless_file(size: int) -> int:
    if sys.platform == "linux":
        descriptor = os.memfd_create("tandem weights")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
