"""A rollout worker, as the pool holds it: what it loads, and its state.

Does not know the meaning of messages or the fate of requests.
"""

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from tandem.engine.dispatch import Ticket, devices_of
from tandem.model import custom_code
from tandem.workers.channel import Message
from tandem.workers.host import Host
from tandem.workers.pool import Worker

COMMAND = (sys.executable, "-P", "-m", "tandem.rollout_workers.worker")
# freed memory stays with the process, as page faults of fresh tensors cost a tenth of a small step
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The engine of each worker.

    longest: most tokens of one sequence that an engine with cache_mb places, as Engine.longest.
    Worker n is on tensor_parallel of the devices, in turn. release_cache: it rests once its step's
    check is made. options: of another engine, by its own names.
    """

    model_path: str
    devices: Sequence[str] = ("cpu",)
    dtype: str = "float32"
    splits: int = 1
    tensor_parallel: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    matmul: str = "plain"
    threads: int = 1
    cache_mb: int
    max_batch: int
    longest: int
    record_experts: bool = False
    release_cache: bool = False

    def start_of(self, number: int) -> Message:
        """Return what the worker of that number is to load."""
        return asdict(self) | {
            "device": devices_of(number, self.tensor_parallel, self.devices),
            "cache_bytes": self.cache_mb << 20,
            "trust_remote_code": custom_code.is_allowed(),
        }


class WorkerProcess(Worker):
    """A worker, and what the pool has told it. Implements dispatch.Worker. restarts: losses of
    those that had its number."""

    def __init__(self, number: int, host: Host, restarts: int = 0):
        super().__init__("rollout worker", number, host)
        self.restarts = restarts
        self.syncing: deque[int] = deque()  # versions that it was told to load and has not answered
        self.offered_at = 0.0  # the last of them, by the monotonic clock
        self.target = -1  # the version that it runs or loads
        self.version = -1  # of the weights that it runs, by its own hash
        self.retried = -1  # the version that it was offered again after a failure
        self.tickets: dict[int, Ticket] = {}  # given and not answered, cancelled ones included
        self.checks: deque[Future[float]] = deque()  # asked for and not answered

    @property
    def started(self) -> bool:
        return self.ready

    @property
    def is_ready(self) -> bool:
        return self.ready and not self.syncing and 0 <= self.version == self.target

    def note_offer(self, version: int) -> None:
        """Note that it is told to load a version now."""
        self.syncing.append(version)
        self.target, self.version, self.offered_at = version, -1, time.monotonic()

    @property
    def state(self) -> str:
        if self.ready and not self.is_ready:
            return "syncing"
        return "serving" if self.is_ready and self.tickets else super().state

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "version": self.version, "restarts": self.restarts}
