"""Worker processes and the JSON lines to them, for the pools of rollout workers and reward workers.

    driver                                         worker
    spawn(command)         a socket pair     --->  its end is standard input: take_channel
    Channel.send           one JSON line     --->  Channel.receive
    Channel.receive        <--- one JSON line      Channel.send
    RestartLimit.spend     <--- the end of the socket

Bounds the size of a line and refuses all but JSON objects, as a worker runs code of users. Knows
neither the meaning of the messages nor when a worker is late.
"""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from tandem.runtime import numerics
from tandem.runtime.place import without_place

Message = dict[str, Any]

_PR_SET_PDEATHSIG = 1
_CHUNK = 1 << 20
_MAX_DESCRIPTORS = 16
_QUOTED = 60  # bytes of a bad line in the error


class ProtocolError(ValueError):
    """An invalid message from the other side."""


class RestartLimit:
    """A count of lost workers; the one after `limit` ends the run, or the pool."""

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0

    def spend(self) -> bool:
        """Count a lost worker; return False if no restart was left."""
        left = self.used < self.limit
        self.used += left
        return left

    def reset(self) -> None:
        """Forget the losses so far, as the workers make progress again."""
        self.used = 0


class Waker:
    """A pipe that ends a thread's wait for sockets: readable once any thread has called `wake`."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._lock, self._closed = threading.Lock(), False

    def fileno(self) -> int:
        return self._reading

    def wake(self) -> None:
        with self._lock, suppress(BlockingIOError):  # it is full of such wishes
            if not self._closed:
                os.write(self._writing, b".")

    def clear(self) -> None:
        """Wait again, after it was readable."""
        os.read(self._reading, _CHUNK)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._reading)
                os.close(self._writing)


class Channel:
    """A socket of JSON lines, and of file descriptors beside them.

    send queues on a non-blocking socket (flush sends the rest) and waits on a blocking one. receive
    never waits. max_descriptors: beside one chunk; the kernel closes any more.
    """

    def __init__(self, connection: socket.socket, max_line_bytes: int, max_descriptors: int = 0):
        self.socket = connection
        self.descriptors: deque[int] = deque()  # received; the reader takes and closes them
        self.last_sent = time.monotonic()
        self._max_line_bytes = max_line_bytes
        self._ancillary_bytes = socket.CMSG_SPACE(4 * max_descriptors) if max_descriptors else 0
        self._incoming = bytearray()
        self._outgoing: deque[tuple[memoryview, int]] = deque()  # bytes, and a descriptor or -1

    @property
    def has_unsent(self) -> bool:
        return bool(self._outgoing)

    def send(self, message: Message, descriptor: int = -1) -> None:
        """Send a message, and a descriptor beside it that is closed once it is sent."""
        self.send_line(encode(message), descriptor)

    def send_line(self, line: bytes, descriptor: int = -1) -> None:
        self.last_sent = time.monotonic()
        self._outgoing.append((memoryview(line), descriptor))
        self.flush()

    def flush(self) -> None:
        """Send as much as goes without waiting. A broken connection shows in `receive`."""
        with suppress(BlockingIOError, ConnectionError, TimeoutError):
            while self._outgoing:
                data, descriptor = self._outgoing[0]
                if descriptor < 0:
                    sent = self.socket.send(data)
                else:
                    sent = socket.send_fds(self.socket, [data], [descriptor])
                    os.close(descriptor)
                self._outgoing[0] = data[sent:], -1
                if sent == len(data):
                    self._outgoing.popleft()

    def receive(self) -> Iterator[Message]:
        """Yield the messages that have arrived.

        Raises ProtocolError at a line that is not a message or is too long, and EOFError at the end
        of the connection; earlier messages have been yielded by then.
        """
        while True:
            try:
                # not recv_fds, which ignores its flags in Python 3.11
                data, beside, _, _ = self.socket.recvmsg(
                    _CHUNK, self._ancillary_bytes, socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return
            except (ConnectionError, TimeoutError):
                raise EOFError from None
            if not data:
                raise EOFError
            for _, _, descriptors in beside:
                self.descriptors += memoryview(descriptors).cast("i")
            self._incoming += data
            if b"\n" in data:
                *lines, rest = bytes(self._incoming).split(b"\n")
                self._incoming = bytearray(rest)
                for line in lines:
                    self._check_length(line)
                    yield decode(line)
            self._check_length(self._incoming)

    def _check_length(self, line: bytes | bytearray) -> None:
        if len(line) > self._max_line_bytes:
            raise ProtocolError(f"a line of more than {self._max_line_bytes >> 20} MiB")

    def wait(self, seconds: float) -> None:
        """Wait for something to receive, at most that long."""
        select.select([self.socket], [], [], seconds)

    def close(self) -> None:
        for descriptor in (*self.descriptors, *(descriptor for _, descriptor in self._outgoing)):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptors.clear()
        self._outgoing.clear()
        self.socket.close()


def encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message of a line. Raises ProtocolError if it is not a JSON object."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ProtocolError(f"not a message: {line[:_QUOTED]!r}")
    return message


# ---------------------------------------------------------------- processes


def spawn(
    command: Sequence[str],
    max_line_bytes: int,
    environment: Mapping[str, str] = {},
    stdout: int | None = None,
    stderr: int | IO[bytes] | None = None,
) -> tuple[subprocess.Popen[bytes], Channel]:
    """Start a worker with one torch thread; returns it and the non-blocking channel to it.

    Its last argument is this process's id, for `die_with_parent`. It gets a session of its own, so
    that Ctrl-C in the terminal does not reach it, and no place among the trainer's processes.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*command, str(os.getpid())],
            stdin=theirs.fileno(),
            env={**without_place(os.environ), **numerics.environment(), **environment},
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    ours.setblocking(False)
    return process, Channel(ours, max_line_bytes)


def take_channel(max_line_bytes: int) -> Channel:
    """Return the worker's end of its channel, which `spawn` made its standard input."""
    return Channel(socket.socket(fileno=os.dup(0)), max_line_bytes, _MAX_DESCRIPTORS)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def die_with_starter() -> None:
    """Have the kernel kill this process when its parent ends, whichever that is by now."""
    die_with_parent(os.getppid())


def kill_group(pid: int) -> None:
    """Kill a process group, which may be gone already; macOS then reports a lack of permission."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def exit_reason(status: int) -> str:
    """Say how a process ended. Example: exit_reason(-9) == "signal 9" """
    return f"signal {-status}" if status < 0 else f"exit {status}"
