"""Weight publication to workers on any node: each version is an object of a store that all nodes
reach (Ray's, which this does not know).

    trainer's thread              pool's thread                      a worker
    ----------------              -------------                      --------
    publish(v): put(all) --->     offer(v): host.give(n, object) --> take(n, buffer)
                                    {"object": n, "names": ..}   --> views of the buffer

A node fetches an object once, and its workers map it without a copy. Of a delta the object has the
tensors that changed and no others, or their differences, once for all workers that run the same
version.
"""

import warnings
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tandem.types import Array
from tandem.weights.shared import Delta, Layout, Sent, SharedWeights, Target

Parts = dict[Layout, Any]  # objects of a version, by what is in them


class ObjectWeights(SharedWeights):
    """SharedWeights in a store of objects. put, get: an object from a uint8 array, and back."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        delta: Delta,
        *,
        put: Callable[[Array], Any],
        get: Callable[[Any], Array],
    ):
        super().__init__(tensors, delta)
        self._put, self._get, self._numbers = put, get, count()

    def offer(self, version: int, workers: Sequence[Target]) -> list[tuple[dict[str, Any], int]]:
        """Give workers the object of a version, or of what changed; as SharedWeights.offer."""
        offers = []
        for worker in workers:
            sent, host = self.sent(version, [worker]), cast(Any, worker).host  # ray_cluster.RayHost
            number = next(self._numbers)
            host.give(number, self._part(version, sent.only))
            offers.append(({**self._message("ray", version, sent), "object": number}, -1))
        return offers

    def _part(self, version: int, wanted: Layout) -> Any:
        """Return the object of some tensors, in the layout of these alone."""
        with self._lock:
            parts: Parts = self._published[version]
        if wanted not in parts:
            whole = self._get(parts[self.layout])
            part = np.empty(wanted.size, np.uint8)
            there, here = self.layout.offsets(), wanted.offsets()
            for name, nbytes in wanted.lengths():
                part[here[name] : here[name] + nbytes] = whole[there[name] : there[name] + nbytes]
            parts[wanted] = self._put(part)
        return parts[wanted]

    def _store(
        self, tensors: dict[str, Tensor], base: Parts | None
    ) -> tuple[Parts, dict[str, str], Sent | None]:
        buffer = np.empty(self._room, np.uint8)
        with warnings.catch_warnings():  # the base's pages are read only, and are only read
            warnings.simplefilter("ignore")
            before = None if base is None else torch.from_numpy(self._get(base[self.layout]))
            digests, sent = self._write(tensors, torch.from_numpy(buffer), before)
        parts = {self.layout: self._put(buffer[: self.layout.size])}
        if sent is not None:
            parts[sent.layout] = self._put(buffer[sent.at : sent.at + sent.layout.size])
        return parts, digests, sent

    def _drop(self, stored: Parts) -> None:
        """Forget the objects; the store frees one when no worker maps it."""
