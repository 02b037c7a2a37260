"""The process of a worker on a node of a cluster: its connection to the driver.

Does not know Ray, whose actor it is (ray_cluster.py), nor what the worker does.
"""

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from tandem.plugins.cluster.listener import CONNECT_S
from tandem.plugins.cluster.logs import redirect_output
from tandem.runtime.errors import UserError
from tandem.workers.channel import Channel, Message
from tandem.workers.serve import serve_calls, serve_from_start


class NodeWorker:
    """A process on a node that serves a pool of the driver; Ray calls its methods."""

    role: ClassVar[str]  # in the status of a run

    def __init__(self) -> None:
        self._thread = 0

    def serve(self, address: tuple[str, int], handshake: Message) -> None:
        """Serve the pool at that address until the connection ends. handshake: with the way of a
        log, if there is one."""
        self._thread = threading.get_ident()
        if log := handshake.pop("log", None):
            redirect_output(log)
        connection = socket.create_connection(address, CONNECT_S)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(connection)
        channel.send({**handshake, "pid": os.getpid()})
        try:
            self.run(channel)
        except Exception:
            traceback.print_exc()  # Ray only tells the driver
            raise

    def run(self, channel: Channel) -> None:
        """Do the work of this kind of worker until the channel ends."""
        raise NotImplementedError

    def stack(self) -> str:
        """Return what `serve` is doing, innermost call first."""
        frame = sys._current_frames().get(self._thread)
        calls = reversed(traceback.extract_stack(frame)) if frame else ()
        return "\n".join(f'File "{c.filename}", line {c.lineno} in {c.name}' for c in calls)


class CallNode(NodeWorker):
    """A NodeWorker that serves calls. service: a class of workers/serve.py:Service. It is made in
    the run's folder of the message that starts the worker, and raises UserError."""

    service: ClassVar[type[Any]]

    def run(self, channel: Channel) -> None:
        def load(start: Message) -> Callable[[], None]:
            try:
                os.chdir(start["folder"])
            except OSError as error:
                key = f"cluster.{self.role.replace(' ', '_')}s"
                raise UserError(
                    f"the {self.role} does not find the run's working directory",
                    where=key,
                    found=f"{start['folder']}: {error.strerror}",
                    expected="the directory that the run was started in, at the same path on every "
                    "node",
                    next=f"mount it there, or leave it to the driver: {key}=0",
                ) from None
            service = self.service(start)
            return partial(serve_calls, channel, service, start["beat_s"])

        serve_from_start(channel, load)
