"""The JSON lines between a pool and its workers, and the file descriptors beside them.

    pool                                           worker
    Channel.send           one JSON line     --->  Channel.receive
    Channel.receive        <--- one JSON line      Channel.send

Bounds the size of a line and refuses all but JSON objects, as a worker runs code of users. Knows
neither the meaning of the messages nor when a worker is late.
"""

import json
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from tandem.runtime.errors import UserError

Message = dict[str, Any]

# a completion of a million tokens has some 20 MB
MAX_LINE_BYTES = 256 * 2**20
_ERROR_FIELDS = ("what", "where", "found", "expected", "next")
_CHUNK = 1 << 20
FORK = "fork"  # the argument that makes a worker's program the fork server of workers
_MAX_DESCRIPTORS = 16
_QUOTED = 60  # bytes of a bad line in the error


class ProtocolError(ValueError):
    """An invalid message from the other side."""


class Waker:
    """A pipe that ends a thread's wait for sockets: readable once any thread has called `wake`."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        self._lock, self._closed, self._woken = threading.Lock(), False, False

    def fileno(self) -> int:
        return self._reading

    def wake(self) -> None:
        with self._lock:
            if not self._closed and not self._woken:
                os.write(self._writing, b".")
                self._woken = True

    def clear(self) -> None:
        """Wait again, after it was readable."""
        with self._lock:
            self._woken = False
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

    def __init__(
        self,
        connection: socket.socket,
        max_line_bytes: int = MAX_LINE_BYTES,
        max_descriptors: int = 0,
    ):
        self.socket = connection
        self.descriptors: deque[int] = deque()  # received; the reader takes and closes them
        self.last_sent = time.monotonic()
        self._max_line_bytes = max_line_bytes
        self._ancillary_bytes = socket.CMSG_SPACE(4 * max_descriptors) if max_descriptors else 0
        self._incoming = bytearray()
        self._outgoing: deque[tuple[memoryview, tuple[int, ...]]] = deque()  # descriptors beside

    @property
    def has_unsent(self) -> bool:
        return bool(self._outgoing)

    def send(self, message: Message, *descriptors: int) -> None:
        """Send a message, and descriptors beside it that are closed once they are sent."""
        self.send_line(encode(message), *descriptors)

    def send_line(self, line: bytes, *descriptors: int) -> None:
        self.last_sent = time.monotonic()
        self._outgoing.append((memoryview(line), descriptors))
        self.flush()

    def flush(self) -> None:
        """Send as much as goes without waiting. A broken connection shows in `receive`."""
        with suppress(BlockingIOError, ConnectionError, TimeoutError):
            while self._outgoing:
                data, descriptors = self._outgoing[0]
                if descriptors:
                    sent = socket.send_fds(self.socket, [data], descriptors)
                    for descriptor in descriptors:
                        os.close(descriptor)
                else:
                    sent = self.socket.send(data)
                self._outgoing[0] = data[sent:], ()
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

    def wait(self, seconds: float | None) -> None:
        """Wait for something to receive, at most that long; None: for ever."""
        select.select([self.socket], [], [], seconds)

    def close(self) -> None:
        for descriptors in (self.descriptors, *(beside for _, beside in self._outgoing)):
            for descriptor in descriptors:
                os.close(descriptor)
        self.descriptors.clear()
        self._outgoing.clear()
        self.socket.close()


def take_channel() -> Channel:
    """Return the worker's end of its channel, which the pool made its standard input."""
    return Channel(socket.socket(fileno=os.dup(0)), max_descriptors=_MAX_DESCRIPTORS)


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


def error_message(error: UserError) -> Message:
    return {"error": {name: getattr(error, name) for name in _ERROR_FIELDS}}


def read_error(message: Message) -> UserError:
    return UserError(**{name: str(message["error"].get(name, "")) for name in _ERROR_FIELDS})
