"""A worker's side of a pool: from the message that starts it to the end of its channel.

pool                                           worker
{"start": {"beat_s", ...}}                -->  load
                                          <--  {"ready": true}
{"id": 7, ...}                            -->  submit
                                          <--  {"id": 7, ...}      once there is a result
                                          <--  {"alive": true}     each beat_s
                                          <--  {"error": {"what", ...}}   a UserError: it ends
"""

import select
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from tandem.runtime.errors import UserError
from tandem.workers.channel import Channel, Message, Waker, error_message
from tandem.workers.fork_server import LONG_CALL_S, repeated


def serve_from_start(channel: Channel, load: Callable[[Message], Callable[[], None]]) -> None:
    """Serve from the message that starts the worker to the end of the channel. A UserError is sent
    to the pool. load: returns what serves until EOFError."""
    try:
        messages: list[Message] = []
        while not messages:
            channel.wait(LONG_CALL_S)
            messages = list(channel.receive())
        [start] = [message["start"] for message in messages]
        with signs_of_life(channel, start["beat_s"]):
            serve = load(start)
        channel.send({"ready": True})
        serve()
    except UserError as error:
        channel.send(error_message(error))
    except EOFError:  # the pool is gone
        return


def signs_of_life(channel: Channel, beat_s: float) -> AbstractContextManager[None]:
    """Give signs of life from another thread while this one is in a long call."""
    return repeated(lambda: channel.send({"alive": True}), beat_s)


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
