"""Weight publication to other processes of this machine: shared memory for each version still
needed.

    trainer's thread             rollouts' thread (engine/worker_pool)    rollout worker
    ----------------             -------------------------------------    --------------
    publish(v, tensors):   --->  apply(v): descriptor(v),           --->  read_tensors, load, hash
      copy and hash                over a socket                                  |
    release(below=v)             compares the hash with hash_of(v)  <-------------+

The caller ensures that publish(v) happens before apply(v). The memory is a file without a name, a
memfd on Linux and an unlinked temporary file elsewhere. So none is left behind: it is gone with the
last process that holds a descriptor. It is written once and never used for another version, so a
worker that is still reading an old one cannot see half of a new one. Does not know the trainer or
the engines.
"""

import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from tandem.weights.hashing import weight_hash

ALIGNMENT = 64  # bytes: a cache line, and more than any type needs
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors one behind the other. Example: Layout((("lm_head.weight", "torch.float32", (97,
    96)),))"""

    parts: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype, shape

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> "Layout":
        return cls(tuple((name, str(t.dtype), tuple(t.shape)) for name, t in tensors.items()))

    @classmethod
    def from_json(cls, parts: list[Any]) -> "Layout":
        """Read `parts` back from JSON, which has lists for tuples."""
        return cls(tuple((name, dtype, tuple(shape)) for name, dtype, shape in parts))

    @property
    def size(self) -> int:
        """Bytes of all tensors, alignment included."""
        return sum(_aligned(prod(shape) * DTYPES[dtype].itemsize) for _, dtype, shape in self.parts)

    def views(self, memory: mmap.mmap) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in the memory, by name; they keep it mapped."""
        at = 0
        for name, dtype, shape in self.parts:
            flat = torch.frombuffer(memory, dtype=DTYPES[dtype], count=prod(shape), offset=at)
            yield name, flat.view(shape)
            at += _aligned(flat.nbytes)


class SharedWeights:
    """Published versions of the weights. Any thread may call any method.

    tensors: names, types and shapes of all versions, e.g. `model.merged_weights()`.
    """

    def __init__(self, tensors: dict[str, Tensor]):
        self.layout = Layout.of(tensors)
        self._lock = threading.Lock()  # of the table only: nothing waits for a copy or a hash
        self._published: dict[int, tuple[int, str]] = {}  # by version: descriptor, hash

    def publish(self, version: int, tensors: dict[str, Tensor]) -> str:
        """Keep a copy of the weights under that number; return their weight_hash.

        The same weights may be published again under their number; others are an error.
        """
        digest = weight_hash(tensors)
        with self._lock:
            is_published = version in self._published
        if is_published:
            if digest != self.hash_of(version):
                raise ValueError(f"other weights are published as version {version} already")
            return digest
        descriptor = _write_tensors(self.layout, tensors)
        with self._lock:
            self._published[version] = descriptor, digest
        return digest

    def hash_of(self, version: int) -> str:
        """Return the weight_hash of a version. Raises LookupError unless it is published."""
        with self._lock:
            return self._entry(version)[1]

    def descriptor(self, version: int) -> int:
        """Return a descriptor for read_tensors, to be closed by the caller. Raises LookupError as
        hash_of."""
        with self._lock:
            return os.dup(self._entry(version)[0])

    @property
    def versions(self) -> list[int]:
        with self._lock:
            return sorted(self._published)

    def release(self, below: int) -> None:
        """Forget the versions below that number."""
        with self._lock:
            for version in [version for version in self._published if version < below]:
                os.close(self._published.pop(version)[0])

    def close(self) -> None:
        """Forget all of them."""
        self.release(below=max(self.versions, default=0) + 1)

    def _entry(self, version: int) -> tuple[int, str]:
        if version not in self._published:
            there = sorted(self._published)
            raise LookupError(f"weights of version {version} are not published; there are {there}")
        return self._published[version]


def read_tensors(layout: Layout, descriptor: int) -> dict[str, Tensor]:
    """Map the tensors of a published version, without a copy; the descriptor may be closed
    afterwards. A write goes to the reader's own pages."""
    return dict(layout.views(mmap.mmap(descriptor, layout.size, access=mmap.ACCESS_COPY)))


def _write_tensors(layout: Layout, tensors: dict[str, Tensor]) -> int:
    """Write a copy of the tensors to a new file; return its descriptor, to be closed by the
    caller."""
    if Layout.of(tensors) != layout:
        raise ValueError("the tensors are not those of the layout: other names, types or shapes")
    descriptor = _nameless_file(layout.size)
    for name, view in layout.views(mmap.mmap(descriptor, layout.size)):
        view.copy_(tensors[name])
    return descriptor


def _nameless_file(size: int) -> int:
    if sys.platform == "linux":
        descriptor = os.memfd_create("tandem weights")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
