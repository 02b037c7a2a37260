"""A rollout worker's process as the driver holds it: how it is started, reached, ended, and what it
said of its end.

It knows neither what it is told nor what becomes of its requests (workers.py does).
"""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Literal

from tandem.engine.worker_pool.protocol import LINE_BYTES, Garbage, Message, decode, encode
from tandem.runtime import numerics
from tandem.types import Completion, Request

State = Literal["starting", "syncing", "idle", "serving"]

EXIT_S = 5.0  # between the end of a worker's socket, or a SIGKILL, and the end of its process
STACK_S = 0.2  # that a silent worker has to write where it is
LOG_BYTES = 1 << 16
LAST_LINES = 6  # of what a worker wrote, for the error that it causes
# freed memory stays with the process, as page faults of fresh tensors cost a tenth of a small step
SETTINGS = {
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


class Lost(Exception):
    """The worker is of no use any more; says why."""


class Handed:
    """A request on its way; `completion` is set when it has ended."""

    __slots__ = ("completion", "identity", "number", "request")

    def __init__(self, number: int, request: Request, identity: str):
        self.number, self.request, self.identity = number, request, identity
        self.completion: Completion | None = None


class Process:
    """A worker process, from its start on."""

    def __init__(self, number: int, command: Sequence[str]):
        self.number = number
        self.started = False  # it said that it is ready
        # versions that it was told to load and did not answer for yet
        self.asked: deque[int] = deque()
        self.version = -1  # of the weights that it runs, by its own hash
        # what it was given and did not answer yet, cancelled ones included
        self.tickets: dict[int, Handed] = {}
        self.silent_s = 0.0  # since its last sign of life, while somebody listened
        self._incoming = bytearray()
        # bytes, and a descriptor beside them or -1
        self._outgoing: deque[tuple[bytes, int]] = deque()
        self.socket, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as log:
            self._log = os.dup(log.fileno())  # what it writes; the file has no name
            self._process = subprocess.Popen(
                [*command, str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=2,
                stderr=log,
                env={**os.environ, **numerics.environment(), **SETTINGS},
                start_new_session=True,  # no terminal reaches it: Ctrl-C is the driver's to handle
            )
        self.socket.setblocking(False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def state(self) -> State:
        if not self.started:
            return "starting"
        if self.asked or self.version < 0:
            return "syncing"
        return "serving" if self.tickets else "idle"

    def send(self, message: Message, descriptor: int = -1) -> None:
        """Queue a message, and a descriptor that is closed once it is sent; what goes without
        waiting goes now."""
        self._outgoing.append((encode(message), descriptor))
        self.flush()

    def flush(self) -> bool:
        """Send what goes without waiting; whether some is left."""
        # its end also shows in receive
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._outgoing:
                data, descriptor = self._outgoing[0]
                if descriptor < 0:
                    sent = self.socket.send(data)
                else:
                    sent = socket.send_fds(self.socket, [data], [descriptor])
                    os.close(descriptor)
                if sent < len(data):
                    self._outgoing[0] = data[sent:], -1
                else:
                    self._outgoing.popleft()
        return bool(self._outgoing)

    def receive(self) -> Iterator[Message]:
        """What it has said. Raises Lost at the end of its socket, and where it said what is no
        message."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            raise Lost(self._how_it_ended())
        self.silent_s = 0.0
        self._incoming += data
        if b"\n" in data:
            *lines, rest = bytes(self._incoming).split(b"\n")
            self._incoming = bytearray(rest)
            for line in lines:
                try:
                    yield decode(line)
                except Garbage as error:
                    raise Lost(f"it wrote what is no message: {error}") from None
        if len(self._incoming) > LINE_BYTES:
            raise Lost(f"it wrote a line of more than {LINE_BYTES >> 20} MiB")

    def stack(self) -> str:
        """Where a silent worker is, innermost call first, if it can say so; it is of no use
        afterwards."""
        before = os.fstat(self._log).st_size
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR2)
        time.sleep(STACK_S)
        lines = os.pread(self._log, LOG_BYTES, before).decode(errors="replace").splitlines()
        return "\n".join(line.strip() for line in lines if line.strip().startswith("File"))

    def last_words(self) -> str:
        """The last lines that it wrote."""
        start = max(0, os.fstat(self._log).st_size - LOG_BYTES)
        lines = os.pread(self._log, LOG_BYTES, start).decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-LAST_LINES:])

    def end(self) -> None:
        """Kill it; once."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)
        for _, descriptor in self._outgoing:
            if descriptor >= 0:
                os.close(descriptor)
        self.socket.close()
        os.close(self._log)

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return (
            f"it was ended by {signal.Signals(-code).name}"
            if code < 0
            else f"it ended with exit code {code}"
        )
