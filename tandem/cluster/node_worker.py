"""The process of a worker on a node of a cluster: its connection to the driver.

Does not know Ray, whose actor it is (ray_cluster.py), nor what the worker does.
"""

import os
import socket
import sys
import threading
import traceback

from tandem.engine.worker_pool.protocol import MAX_LINE_BYTES
from tandem.runtime.worker_channel import Channel, Message

CONNECT_S = 10.0  # for a connection, and for its first line


class NodeWorker:
    """A process on a node that serves a pool of the driver; Ray calls its methods."""

    def __init__(self) -> None:
        self._thread = 0

    def serve(self, address: tuple[str, int], handshake: Message) -> None:
        """Serve the pool at that address until the connection ends."""
        self._thread = threading.get_ident()
        connection = socket.create_connection(address, CONNECT_S)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(connection, MAX_LINE_BYTES)
        channel.send({**handshake, "pid": os.getpid()})
        self.run(channel)

    def run(self, channel: Channel) -> None:
        """Do the work of this kind of worker until the channel ends."""
        raise NotImplementedError

    def stack(self) -> str:
        """Return what `serve` is doing, innermost call first."""
        frame = sys._current_frames().get(self._thread)
        calls = reversed(traceback.extract_stack(frame)) if frame else ()
        return "\n".join(f'File "{c.filename}", line {c.lineno} in {c.name}' for c in calls)
