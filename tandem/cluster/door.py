"""The driver's door: connections from workers on other nodes, each proved by the run's token.

    Door.expect(take)  -> the greeting that a worker is given: the token, and its own number
    Door.open          accepts what has come; a connection whose first line is such a greeting goes
                       to `take`, once; any other is closed, a silent one after CONNECT_S

Nothing here waits. Does not know Ray.
"""

import hmac
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from tandem.cluster.rollout_worker import CONNECT_S
from tandem.runtime.worker_channel import Channel, Message, ProtocolError

GREETING_BYTES = 4096
MOST_STRANGERS = 1024  # connections without a greeting yet

Take = Callable[[socket.socket, Message], None]


class Door:
    """A listening socket on one address of this machine. address: host and port."""

    def __init__(self, host: str):
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._token, self._numbers = secrets.token_hex(32), count()
        self._expected: dict[int, Take] = {}
        self._strangers: list[tuple[Channel, float]] = []  # and until when they may greet

    def expect(self, take: Take) -> Message:
        """Return the greeting that brings a connection to `take`."""
        number = next(self._numbers)
        self._expected[number] = take
        return {"token": self._token, "number": number}

    def forget(self, greeting: Message) -> None:
        """Refuse this greeting from now on."""
        self._expected.pop(greeting["number"], None)

    def open(self) -> None:
        """Accept the connections that have come, and hear those that have said something."""
        with suppress(BlockingIOError):
            while len(self._strangers) < MOST_STRANGERS:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                until = time.monotonic() + CONNECT_S
                self._strangers.append((Channel(connection, GREETING_BYTES), until))
        self._strangers = [known for known in self._strangers if self._is_silent(*known)]

    def _is_silent(self, channel: Channel, until: float) -> bool:
        """Handle the first line of a connection; return whether it may still come."""
        with suppress(EOFError, ProtocolError):
            greeting = next(channel.receive(), None)
            if greeting is None and time.monotonic() < until:
                return True
            if greeting is not None and (take := self._taker(greeting)) is not None:
                take(channel.socket, greeting)
                return False
        channel.close()
        return False

    def _taker(self, greeting: Message) -> Take | None:
        proves = hmac.compare_digest(str(greeting.get("token")).encode(), self._token.encode())
        number = greeting.get("number")
        return self._expected.pop(number, None) if proves and isinstance(number, int) else None

    def close(self) -> None:
        for channel, _ in self._strangers:
            channel.close()
        self._listener.close()
