"""The process of a worker on a node of a cluster: its channel to the driver.

Does not know Ray, whose actor it is (ray_cluster.py), nor what the worker does.
"""

import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar, Protocol

from tandem.plugins.cluster.logs import redirect_output
from tandem.runtime.errors import UserError
from tandem.workers.channel import Channel, Message, Waker
from tandem.workers.serve import serve_from_start

CHUNK = 1 << 16  # bytes that an actor call carries without Ray's store


class NodeWorker:
    """A process on a node that serves a pool of the driver; Ray calls its methods, each from a
    thread of its own."""

    role: ClassVar[str]  # in the status of a run

    def __init__(self) -> None:
        self._thread = 0
        self._own, self._drivers = socket.socketpair()

    def serve(self, log: str) -> None:
        """Serve the pool until its end. log: the file for what this process writes, if any."""
        self._thread = threading.get_ident()
        if log:
            redirect_output(log)
        try:
            with self._own:
                self.run(Channel(self._own))
        except Exception:
            traceback.print_exc()  # Ray only tells the driver
            raise

    def read(self) -> bytes:
        """Wait for bytes of the channel to the driver; none at its end."""
        return self._drivers.recv(CHUNK)

    def write(self, data: bytes) -> None:
        """Take bytes of the channel from the driver."""
        self._drivers.sendall(data)

    def run(self, channel: Channel) -> None:
        """Do the work of this kind of worker until the channel ends."""
        raise NotImplementedError

    def stack(self) -> str:
        """Return what `serve` is doing, innermost call first."""
        frame = sys._current_frames().get(self._thread)
        calls = reversed(traceback.extract_stack(frame)) if frame else ()
        return "\n".join(f'File "{c.filename}", line {c.lineno} in {c.name}' for c in calls)


class CallNode(NodeWorker):
    """A NodeWorker that serves calls. service: a class of Service. It is made in the run's folder,
    of the message that starts the worker, and raises UserError."""

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
                    next=f"mount it there, or leave it to the driver: {key}=0",
                ) from None
            service = self.service(start)
            return partial(serve_calls, channel, service, start["beat_s"])

        serve_from_start(channel, load)


class Service(Protocol):
    """Server of calls, several at once; open until the channel ends."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...

    def submit(self, call: Message) -> Future[Any]:
        """Begin to serve a call."""

    def answer(self, result: Any) -> Message:
        """Return the fields of the answer."""

    def check(self) -> None:
        """Raise UserError if the calls cannot be served any more; called each beat."""


def serve_calls(channel: Channel, service: Service, beat_s: float) -> None:
    """Serve until the channel ends: EOFError. Only this thread sends."""
    waker, done = Waker(), deque[tuple[int, Future[Any]]]()

    def on_done(number: int, result: Future[Any]) -> None:
        done.append((number, result))
        waker.wake()

    with service:
        while True:
            descriptors = [channel.socket.fileno(), waker.fileno()]
            ready, _, _ = select.select(descriptors, [], [], beat_s)
            if waker.fileno() in ready:
                waker.clear()
            for call in channel.receive():
                service.submit(call).add_done_callback(partial(on_done, call["id"]))
            while done:
                number, result = done.popleft()
                channel.send({"id": number, **service.answer(result.result())})
            if time.monotonic() - channel.last_sent >= beat_s:
                service.check()
                channel.send({"alive": True})
