"""Weight publication to other processes of this machine: a buffer of shared memory for each version
that is still needed.

    trainer's thread                          rollouts' thread (engine/worker_pool/pool.py)          rollout worker
    ----------------                          ------------------------------------          --------------
    publish(v, tensors): copy and hash  --->  apply(v): descriptor(v), over a socket  --->  read_tensors, load, hash
    release(below=v): forget            <---  compares that hash with hash_of(v)      <---  its hash

publish(v) happens before apply(v): the caller sees to that. A buffer is written once and never used
again for another version, so a worker that is still reading an old one, which it keeps alive
itself, cannot see half of a new one. Nothing has a name in a file system, so nothing is left
behind. Does not know who computes the weights, or who runs them.
"""

import os
import threading

from torch import Tensor

from tandem.weights.hashing import weight_hash
from tandem.weights.mapped import Layout, write_tensors


class SharedWeights:
    """Any thread may call any method. tensors: names, types and shapes of all versions, e.g.
    `model.merged_weights()`."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.layout = Layout.of(tensors)
        self._lock = threading.Lock()  # of the table only: nobody waits for a copy or a hash
        self._published: dict[int, tuple[int, str]] = {}  # by version: descriptor, hash

    def publish(self, version: int, tensors: dict[str, Tensor]) -> str:
        """Keep a copy of the weights under that number; returns model.hashing.weight_hash of them.

        The same weights may be published again under their number; others are an error.
        """
        digest = weight_hash(tensors)
        with self._lock:
            known = version in self._published
        if known:
            if digest != self.hash_of(version):
                raise ValueError(f"other weights are published as version {version} already")
            return digest
        descriptor = write_tensors(self.layout, tensors)
        with self._lock:
            self._published[version] = descriptor, digest
        return digest

    def hash_of(self, version: int) -> str:
        """weight_hash of what was published. Raises LookupError where that is not there, or no
        more."""
        with self._lock:
            return self._entry(version)[1]

    def descriptor(self, version: int) -> int:
        """A descriptor for model.mapped.read_tensors, the caller's own to close. Raises LookupError
        as hash_of."""
        with self._lock:
            return os.dup(self._entry(version)[0])

    @property
    def versions(self) -> list[int]:
        with self._lock:
            return sorted(self._published)

    def release(self, below: int) -> None:
        """Forget the versions with smaller numbers."""
        with self._lock:
            for version in [version for version in self._published if version < below]:
                os.close(self._published.pop(version)[0])

    def close(self) -> None:
        """Forget all of them."""
        self.release(below=max(self.versions, default=0) + 1)

    def _entry(self, version: int) -> tuple[int, str]:
        if version not in self._published:
            raise LookupError(
                f"weights of version {version} are not published; there are {sorted(self._published)}"
            )
        return self._published[version]
