"""Weight publication to other processes of this machine: shared memory for each version still
needed.

    trainer's thread             rollouts' thread (rollout_workers)    rollout worker
    ----------------             -------------------------------------    --------------
    publish(v, tensors):   --->  apply(v): offer(v), a descriptor   --->  read_tensors, load, digest
      copy and digest              over a socket                                  |
    release(below=v)             compares them with hash_of(v)      <-------------+

The caller ensures that publish(v) happens before apply(v). The memory is a file without a name, a
memfd on Linux and an unlinked temporary file elsewhere. So none is left behind: it is gone with the
last process that holds a descriptor. The memory of a released version is written again for a later
one, as new pages cost more than the copy. A worker that still reads the old one then finds a
mixture, whose digests are wrong; nobody waits for them, and it gets the later version next. Does
not know the trainer or the engines. The other transports (collective.py, rdma.py) send from the
same copies.
"""

import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.types import Row
from tandem.weights.delta import encode
from tandem.weights.hashing import begin_digest, combine, raw_bytes

ALIGNMENT = 64  # bytes: a cache line, and more than any type needs
CHUNK = 1 << 18  # bytes that are copied and then digested while a cache has them
KEPT_DIGESTS = 16  # versions below the last published one that a worker's weights are compared with
DTYPES = {
    str(dtype): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8)
}

# What a worker is sent that runs an earlier version. False: all; True: the tensors that differ;
# elements: from the version before of these their difference (delta.py).
Delta = bool | Literal["elements"]


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

    def only(self, names: Collection[str] | None) -> "Layout":
        """Return the layout of some of the tensors, in the same order; None: of all."""
        if names is None:
            return self
        wanted = set(names)
        return Layout(tuple(part for part in self.parts if part[0] in wanted))

    @property
    def size(self) -> int:
        """Bytes of all tensors, alignment included."""
        return sum(_aligned(nbytes) for _, nbytes in self.lengths())

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(nbytes for _, nbytes in self.lengths())

    def lengths(self) -> list[tuple[str, int]]:
        """List names and bytes of the tensors."""
        return [(name, prod(shape) * DTYPES[dtype].itemsize) for name, dtype, shape in self.parts]

    def offsets(self) -> dict[str, int]:
        """Return the byte at which each tensor begins, by name."""
        found, at = {}, 0
        for name, nbytes in self.lengths():
            found[name] = at
            at += _aligned(nbytes)
        return found

    def views(self, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in the memory, uint8 [size] or longer, by name."""
        at = self.offsets()
        for (name, nbytes), (_, dtype, shape) in zip(self.lengths(), self.parts, strict=True):
            yield name, memory[at[name] : at[name] + nbytes].view(DTYPES[dtype]).view(shape)

    def staging(self, device: torch.device | str = "cpu") -> tuple[Tensor, dict[str, Tensor]]:
        """Return new memory, uint8 [size], and the tensors in it, by name and not yet filled."""
        memory = torch.empty(self.size, dtype=torch.uint8, device=device)
        return memory, dict(self.views(memory))


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Memory of one version, uint8 [size], and the descriptor of the file without a name that is
    mapped there; -1: none."""

    descriptor: int
    mapped: Tensor


@dataclass(frozen=True, slots=True)
class Sent:
    """Part of a version that is sent. layout: of memory from byte `at` on; names: of tensors there,
    None for all.

    at: 0, or that behind the version, where the differences from the version before it are.
    """

    layout: Layout
    names: list[str] | None = None
    at: int = 0

    @property
    def only(self) -> Layout:
        """The layout of what is sent, alone."""
        return self.layout.only(self.names)


class Target(Protocol):
    """A worker that is offered weights. version: of those that it runs, -1 for none."""

    version: int


class SharedWeights:
    """Published versions of the weights. Any thread may call any method.

    tensors: names, types and shapes of all versions, e.g. `model.merged_weights()`.
    """

    digest = "xxh3"  # of tensors, by its name in hashing.DIGESTS

    def __init__(self, tensors: dict[str, Tensor], delta: Delta = False):
        self.layout, self.delta = Layout.of(tensors), delta
        # bytes of a version, and as many behind it for a difference, which is shorter
        self._room = self.layout.size * (1 if isinstance(delta, bool) else 2)
        self.sent_bytes = 0  # of tensors offered to workers, all together
        self._lock = threading.Lock()  # of the tables only: nothing waits for a copy or a hash
        self._stats: dict[int, Row] = {}  # by version, what `stats` has not returned
        self._published: dict[int, Any] = {}  # by version: what `_store` keeps, Memory
        self._probes: dict[int, dict[str, Any] | None] = {}
        # by version: its base, and what is behind it in memory
        self._differences: dict[int, tuple[int, Sent]] = {}
        self._free: list[Memory] = []  # of released versions
        # by version, of the published ones and of some before
        self._digests: dict[int, dict[str, str]] = {}

    def publish(
        self, version: int, tensors: dict[str, Tensor], probe: dict[str, Any] | None = None
    ) -> str:
        """Keep a copy of the weights under a new number; return hash_of(version). probe: told to
        the workers that are offered them."""
        with self._lock:
            if version in self._published:
                raise ValueError(f"weights are published as version {version} already")
            base = max(self._published, default=-1)
        if Layout.of(tensors) != self.layout:
            raise ValueError("the tensors are not those of the layout: other names, types, shapes")
        stored, digests, difference = self._store(tensors, self._published.get(base))
        with self._lock:
            if difference is not None:
                self._differences[version] = base, difference
            self._published[version], self._digests[version] = stored, digests
            self._probes[version] = probe
        return combine(digests)

    def _store(
        self, tensors: dict[str, Tensor], base: Any
    ) -> tuple[Any, dict[str, str], Sent | None]:
        """Keep a copy of the tensors, and the difference from the stored `base` if there is one;
        return it, their digests, and where the difference is."""
        with self._lock:
            free = self._free.pop() if self._free else None
        memory = free or self._new_memory()
        return memory, *self._write(tensors, memory.mapped, base and base.mapped)

    def _write(
        self, tensors: Mapping[str, Tensor], memory: Tensor, base: Tensor | None
    ) -> tuple[dict[str, str], Sent | None]:
        """Write a version to memory, uint8 [_room], and behind it the difference from a base."""
        digests = self._copy(self.layout, tensors, memory)
        if base is None or isinstance(self.delta, bool):
            return digests, None
        old = dict(self.layout.views(base))
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            found = list(threads.map(lambda n: encode(old[n], tensors[n]), old))
        parts = {n: part for n, part in zip(old, found, strict=True) if part is not None}
        if all(part.dtype == tensors[name].dtype for name, part in parts.items()):
            return digests, None  # the tensors themselves are sent
        sent = Sent(Layout.of(parts), at=self.layout.size)
        self._copy(sent.layout, parts, memory[sent.at :])
        return digests, sent

    def _copy(
        self, layout: Layout, tensors: Mapping[str, Tensor], memory: Tensor
    ) -> dict[str, str]:
        """Write a copy of the tensors to memory; return the digest of each."""
        return write_tensors(layout, tensors, memory)

    def _drop(self, stored: Any) -> None:
        """Forget a copy."""
        self._free.append(stored)

    def hash_of(self, version: int) -> str:
        """Return hashing.combine of a version's digests. Raises LookupError unless published."""
        with self._lock:
            self._require(version)
            return combine(self._digests[version])

    def descriptor(self, version: int) -> int:
        """Return a descriptor for read_tensors, to be closed by the caller. Raises LookupError as
        hash_of."""
        with self._lock:
            self._require(version)
            return os.dup(self._published[version].descriptor)

    def offer(self, version: int, workers: Sequence[Target]) -> list[tuple[dict[str, Any], int]]:
        """Return for each worker what transports.Receiver needs to read a version: a part of its
        message, and a descriptor beside it or -1. Raises LookupError as hash_of."""
        offers = []
        for worker in workers:
            message = self._message("shm", version, self.sent(version, [worker]))
            offers.append((message, self.descriptor(version)))
        return offers

    def sent(self, version: int, workers: Sequence[Target]) -> Sent:
        """Return what of a version makes it of what each of the workers runs. Raises LookupError as
        hash_of."""
        bases = {worker.version for worker in workers}
        with self._lock:
            self._require(version)
            if not self.delta or not bases <= self._digests.keys():
                return Sent(self.layout)
            base, difference = self._differences.get(version, (-1, None))
            if difference is not None and bases == {base}:
                return difference
            new = self._digests[version]
            differ = [n for n in new if any(self._digests[base][n] != new[n] for base in bases)]
            return Sent(self.layout, differ if len(differ) < len(new) else None)

    def loaded(self, version: int, seconds: float) -> None:
        """Note how long it took from the offer of a version until the worker ran it."""
        with self._lock:
            row = self._stats.setdefault(version, {})
            row["load_s"] = max(seconds, row.get("load_s", 0.0))

    def stats(self, version: int) -> Row:
        """Return what was sent of a version since the last call: `sync_bytes`, and if a worker came
        to run it `load_s`, the longest that one took."""
        with self._lock:
            return {"sync_bytes": 0, **self._stats.pop(version, {})}

    @property
    def versions(self) -> list[int]:
        with self._lock:
            return sorted(self._published)

    def release(self, below: int) -> None:
        """Forget the versions below that number."""
        with self._lock:
            for version in [version for version in self._published if version < below]:
                self._drop(self._published.pop(version))
                del self._probes[version]
                self._differences.pop(version, None)
                self._stats.pop(version, None)
            for version in [v for v in self._digests if v < below - KEPT_DIGESTS]:
                del self._digests[version]

    def close(self) -> None:
        """Forget all of them, and free the memory."""
        self.release(below=max(self.versions, default=0) + 1)
        while self._free:
            self._end_memory(self._free.pop())

    def _message(self, transport: str, version: int, sent: Sent) -> dict[str, Any]:
        """Return what every transport's offer has; count its bytes."""
        with self._lock:
            nbytes = sent.only.tensor_bytes
            row = self._stats.setdefault(version, {})
            row["sync_bytes"] = row.get("sync_bytes", 0) + nbytes
            self.sent_bytes += nbytes
            digests, probe = self._digests[version], self._probes[version]
        message = {
            "transport": transport,
            "names": sent.names,
            "digest": self.digest,
            "digests": digests,
            "probe": probe,
        }
        return message | ({"parts": sent.layout.parts, "at": sent.at} if sent.at else {})

    def _require(self, version: int) -> None:
        if version not in self._published:
            there = sorted(self._published)
            raise LookupError(f"weights of version {version} are not published; there are {there}")

    def _new_memory(self) -> Memory:
        if sys.platform == "linux":
            descriptor = os.memfd_create("tandem weights")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, self._room)
        mapped = mmap.mmap(descriptor, self._room)
        return Memory(descriptor, torch.frombuffer(mapped, dtype=torch.uint8))

    def _end_memory(self, memory: Memory) -> None:
        os.close(memory.descriptor)


def offered_layout(source: Mapping[str, Any], layout: Layout) -> Layout:
    """Return the layout that an offer's tensors are read by. layout: of the trainer's weights."""
    return Layout.from_json(source["parts"]) if "parts" in source else layout


def read_tensors(
    layout: Layout, descriptor: int, names: Collection[str] | None = None, at: int = 0
) -> dict[str, Tensor]:
    """Map the tensors of a published version, without a copy; the descriptor may be closed
    afterwards. A write goes to the reader's own pages. names: by default all; at: as of Sent."""
    memory = mmap.mmap(descriptor, at + layout.size, access=mmap.ACCESS_COPY)
    return chosen(layout, torch.frombuffer(memory, dtype=torch.uint8)[at:], names)


def chosen(layout: Layout, memory: Tensor, names: Collection[str] | None) -> dict[str, Tensor]:
    """Return some of the tensors that lie in memory, or all, without a copy."""
    tensors = dict(layout.views(memory))
    return tensors if names is None else {name: tensors[name] for name in names}


def write_tensors(layout: Layout, tensors: Mapping[str, Tensor], memory: Tensor) -> dict[str, str]:
    """Write a copy of the tensors to memory of the CPU, uint8 [size], on torch's number of threads;
    return the tensor_digest of each."""
    offsets, copies = layout.offsets(), memory.numpy()

    def write(name: str) -> str:
        """Copy and digest chunk by chunk, so that main memory is read once. System calls copy at
        less than half the speed, but for pages that are new."""
        digest, data = begin_digest(tensors[name]), np.asarray(raw_bytes(tensors[name]))
        copy = copies[offsets[name] :]
        for start in range(0, len(data), CHUNK):
            chunk = data[start : start + CHUNK]
            copy[start : start + len(chunk)] = chunk
            digest.update(chunk.data)
        return digest.hexdigest()

    left, num_threads = iter(offsets), torch.get_num_threads()  # each thread takes the next one
    with ThreadPoolExecutor(num_threads) as threads:
        parts = threads.map(lambda _: [(name, write(name)) for name in left], range(num_threads))
        found = dict(chain.from_iterable(parts))
    return {name: found[name] for name in offsets}


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
