"""The process of a rollout worker, as the pool holds it: its start, state, last words and end.

Does not know the meaning of messages or the fate of requests.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from tandem.engine.worker_pool.protocol import MAX_LINE_BYTES
from tandem.runtime.worker_channel import spawn
from tandem.types import Completion, Request

State = Literal["starting", "syncing", "idle", "serving"]

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


class Ticket:
    """A request on its way; `completion` is set once it has ended."""

    __slots__ = ("completion", "identity", "number", "request")

    def __init__(self, number: int, request: Request, identity: str):
        self.number, self.request, self.identity = number, request, identity
        self.completion: Completion | None = None


class WorkerProcess:
    """A worker process."""

    def __init__(self, number: int, command: Sequence[str]):
        self.number = number
        self.started = False  # it said that it is ready
        self.syncing: deque[int] = deque()  # versions that it was told to load and has not answered
        self.version = -1  # of the weights that it runs, by its own hash
        self.tickets: dict[int, Ticket] = {}  # given and not answered, cancelled ones included
        self.silent_s = 0.0  # time that the pool listened since the last sign of life
        with tempfile.TemporaryFile() as log:
            self._log = os.dup(log.fileno())  # the file has no name
            self._process, self.channel = spawn(
                command, MAX_LINE_BYTES, ENVIRONMENT, stdout=2, stderr=log
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def state(self) -> State:
        if not self.started:
            return "starting"
        if self.syncing or self.version < 0:
            return "syncing"
        return "serving" if self.tickets else "idle"

    def __str__(self) -> str:
        return f"rollout worker {self.number} (process {self.pid})"

    def stack(self) -> str:
        """Return a silent worker's stack, innermost call first, if it can tell; end it
        afterwards."""
        before = os.fstat(self._log).st_size
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR2)
        time.sleep(STACK_S)
        lines = (line.strip() for line in self._read_log(before))
        return "\n".join(line for line in lines if line.startswith("File"))

    def last_words(self) -> str:
        """Return the last lines of its log."""
        start = max(0, os.fstat(self._log).st_size - LOG_BYTES)
        return "\n".join(self._read_log(start)[-LAST_LINES:])

    def _read_log(self, start: int) -> list[str]:
        return os.pread(self._log, LOG_BYTES, start).decode(errors="replace").strip().splitlines()

    def how_it_ended(self) -> str:
        """Describe how it ended, after its socket has."""
        try:
            code = self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        return f"it ended with exit code {code}"

    def end(self) -> None:
        """Kill it; once."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)
        self.channel.close()
        os.close(self._log)
