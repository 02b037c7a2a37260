"""A rollout worker, as the pool holds it: its state, and its process, here (LocalProcess,
forked.py) or on another node (cluster/ray_cluster.py).

Does not know the meaning of messages or the fate of requests.
"""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tandem.engine.worker_pool.dispatch import Ticket
from tandem.engine.worker_pool.protocol import MAX_LINE_BYTES
from tandem.runtime.worker_channel import Channel, Message, spawn

if TYPE_CHECKING:  # nothing here needs torch
    from tandem.weights.shared import Layout

State = Literal["starting", "syncing", "idle", "serving"]

HERE = socket.gethostname()

EXIT_S = 5.0  # between the end of a worker's socket, or a SIGKILL, and the end of its process
STACK_S = 0.2  # for a silent worker to write where it is
LOG_BYTES = 1 << 16
LAST_LINES = 6  # of a worker's log, for the error that it causes
# freed memory stays with the process, as page faults of fresh tensors cost a tenth of a small step
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


class Host(Protocol):
    """The process of a worker, from its start on."""

    node: str  # the machine that it runs on

    @property
    def pid(self) -> int:
        """Its process there; 0: not known yet."""

    def connect(self) -> Channel | None:
        """Return the non-blocking channel to it; None as long as it has not connected. Raises
        EOFError if it never will."""

    def stack(self) -> str:
        """Return a silent worker's stack, innermost call first, if it can tell; end it
        afterwards."""

    def last_words(self) -> str:
        """Return the last lines that it wrote."""

    def how_it_ended(self) -> str:
        """Describe how it ended, after its connection has."""

    def end(self) -> None:
        """Kill it, and close the channel; once."""


Spawn = Callable[[int], Host]  # starts the process of the worker of that number


class Published(Protocol):
    """The published weights: weights/shared.py, or cluster/ray_cluster.py."""

    layout: "Layout"

    def offer(self, version: int, workers: "Sequence[WorkerProcess]") -> list[tuple[Message, int]]:
        """Return what each of the workers needs to load a version: the part "from" of its message,
        and a descriptor that the channel closes, or -1."""

    def hash_of(self, version: int) -> str:
        """Return weights.hashing.combine of the digests of the trainer's weights."""

    def loaded(self, version: int, seconds: float) -> None:
        """Note how long it took from the offer of a version until the worker ran it."""


class WorkerProcess:
    """A worker, and what the pool has told it. Implements dispatch.Worker."""

    def __init__(self, number: int, host: Host):
        self.number, self.host = number, host
        self.connection: Channel | None = None  # not yet
        self.started = False  # it said that it is ready
        self.syncing: deque[int] = deque()  # versions that it was told to load and has not answered
        self.offered_at = 0.0  # the last of them, by the monotonic clock
        self.target = -1  # the version that it runs or loads
        self.version = -1  # of the weights that it runs, by its own hash
        self.retried = -1  # the version that it was offered again after a failure
        self.tickets: dict[int, Ticket] = {}  # given and not answered, cancelled ones included
        self.num_completed = 0
        self.silent_s = 0.0  # time that the pool listened since the last sign of life

    @property
    def channel(self) -> Channel:
        """Its channel, once it has connected."""
        assert self.connection is not None
        return self.connection

    @property
    def pid(self) -> int:
        return self.host.pid

    @property
    def is_ready(self) -> bool:
        return self.started and not self.syncing and 0 <= self.version == self.target

    def note_offer(self, version: int) -> None:
        """Note that it is told to load a version now."""
        self.syncing.append(version)
        self.target, self.version, self.offered_at = version, -1, time.monotonic()

    @property
    def state(self) -> State:
        if not self.started:
            return "starting"
        if not self.is_ready:
            return "syncing"
        return "serving" if self.tickets else "idle"

    def describe(self) -> dict[str, Any]:
        """Describe where it runs and what it does, for `tandem status`."""
        return {
            "role": f"rollout worker {self.number}",
            "node": self.host.node,
            "pid": self.pid,
            "state": self.state,
            "version": self.version,
            "requests": self.num_completed,
        }

    def __str__(self) -> str:
        place = "" if self.host.node == HERE else f" on {self.host.node}"
        return f"rollout worker {self.number} (process {self.pid}{place})"


class LocalProcess:
    """A worker's process on this machine, started by its command. Implements Host."""

    def __init__(self, command: Sequence[str]):
        self.node, self._log = HERE, open_log()
        self._process, self._channel = spawn(
            command, MAX_LINE_BYTES, ENVIRONMENT, stdout=2, stderr=self._log
        )
        self.pid = self._process.pid

    def connect(self) -> Channel:
        return self._channel

    def stack(self) -> str:
        return read_stack(self.pid, self._log)

    def last_words(self) -> str:
        return read_end(self._log)

    def how_it_ended(self) -> str:
        try:
            return describe_exit(self._process.wait(EXIT_S))
        except subprocess.TimeoutExpired:
            return "it closed its socket"

    def end(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)
        self._channel.close()
        os.close(self._log)


def open_log() -> int:
    """Open a file without a name, which goes with its last descriptor."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read_stack(pid: int, log: int) -> str:
    """Have a process of this machine write its stack to its log; return that."""
    before = os.fstat(log).st_size
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
    time.sleep(STACK_S)
    lines = (line.strip() for line in _read_log(log, before))
    return "\n".join(line for line in lines if line.startswith("File"))


def read_end(log: int) -> str:
    """Read the last lines of a log."""
    return "\n".join(_read_log(log, max(0, os.fstat(log).st_size - LOG_BYTES))[-LAST_LINES:])


def _read_log(log: int, start: int) -> list[str]:
    return os.pread(log, LOG_BYTES, start).decode(errors="replace").strip().splitlines()


def describe_exit(status: int) -> str:
    """Say how a worker ended. Example: describe_exit(-9) == "it was ended by SIGKILL" """
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it ended with exit code {status}"
