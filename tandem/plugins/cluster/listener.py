"""The driver's listener: connections from workers on other nodes, each proved by the run's token.

    Listener.expect(on_connected) -> the handshake of a worker: the token, and its own number
    Listener.accept    accepts what has come; a connection whose first line is such a handshake goes
                       to `on_connected`, once; any other is closed, a silent one after CONNECT_S

Nothing here waits. Does not know Ray.
"""

import hmac
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from tandem.workers.channel import Channel, Message, ProtocolError

CONNECT_S = 10.0  # for a connection, and for its first line
HANDSHAKE_BYTES = 4096
MOST_PENDING = 256  # connections without a handshake yet

OnConnected = Callable[[socket.socket, Message], None]


class Listener:
    """A listening socket on one address of this machine. address: host and port."""

    def __init__(self, host: str):
        self._socket = socket.create_server((host, 0), backlog=128)
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()
        self._token, self._numbers = secrets.token_hex(32), count()
        self._expected: dict[int, OnConnected] = {}
        self._pending: list[tuple[Channel, float]] = []  # and their deadlines

    def expect(self, on_connected: OnConnected) -> Message:
        """Return the handshake that brings a connection to `on_connected`."""
        number = next(self._numbers)
        self._expected[number] = on_connected
        return {"token": self._token, "number": number}

    def forget(self, handshake: Message) -> None:
        """Refuse this handshake from now on."""
        self._expected.pop(handshake["number"], None)

    def accept(self) -> None:
        """Accept the connections that have come, and read the handshakes that are there. Those that
        this process has no descriptors for wait."""
        with suppress(OSError):
            while len(self._pending) < MOST_PENDING:
                connection, _ = self._socket.accept()
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                until = time.monotonic() + CONNECT_S
                self._pending.append((Channel(connection, HANDSHAKE_BYTES), until))
        self._pending = [pending for pending in self._pending if self._is_silent(*pending)]

    def _is_silent(self, channel: Channel, until: float) -> bool:
        """Handle the first line of a connection; return whether it may still come."""
        with suppress(EOFError, ProtocolError):
            handshake = next(channel.receive(), None)
            if handshake is None and time.monotonic() < until:
                return True
            if handshake is not None and (on_connected := self._expects(handshake)) is not None:
                on_connected(channel.socket, handshake)
                return False
        channel.close()
        return False

    def _expects(self, handshake: Message) -> OnConnected | None:
        token = str(handshake.get("token")).encode(errors="replace")
        proves = hmac.compare_digest(token, self._token.encode())
        number = handshake.get("number")
        return self._expected.pop(number, None) if proves and isinstance(number, int) else None

    def close(self) -> None:
        for channel, _ in self._pending:
            channel.close()
        self._socket.close()
