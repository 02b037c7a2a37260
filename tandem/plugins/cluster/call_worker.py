"""A worker on a node of a cluster that serves the calls of a NodePool (node_pool.py).

    driver                                         here
    {"start": {"folder", "beat_s", ...}}      -->  load, in that folder
                                              <--  {"ready": true}
    {"id": 7, ...}                            -->  submit
                                              <--  {"id": 7, ...}      once there is a result
                                              <--  {"alive": true}     each beat_s
                                              <--  {"error": {"what", ...}}   a UserError: it ends

Waits for: the channel and the results, at most beat_s. Knows neither Ray nor the calls.
"""

import os
import select
import time
from collections import deque
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from tandem.engine.worker_pool.worker import serve_from_start
from tandem.plugins.cluster.errors import no_working_directory
from tandem.plugins.cluster.node_worker import NodeWorker
from tandem.runtime.worker_channel import Channel, Message, Waker


class CallWorker(NodeWorker):
    """A NodeWorker that serves calls, several at once."""

    def load(self, start: Message) -> AbstractContextManager[object]:
        """Load what serves the calls; return what is open as long. Raises UserError."""
        raise NotImplementedError

    def submit(self, call: Message) -> Future[Any]:
        """Begin to serve a call."""
        raise NotImplementedError

    def answer(self, result: Any) -> Message:
        """Return the fields of the answer."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise UserError if the calls cannot be served any more; called each beat."""

    def run(self, channel: Channel) -> None:
        serve_from_start(channel, partial(self._load, channel))

    def _load(self, channel: Channel, start: Message) -> partial[None]:
        try:
            os.chdir(start["folder"])
        except OSError as error:
            raise no_working_directory(self.role, start["folder"], error) from None
        return partial(self._serve, channel, self.load(start), start["beat_s"])

    def _serve(
        self, channel: Channel, loaded: AbstractContextManager[object], beat_s: float
    ) -> None:
        """Serve until the channel ends: EOFError. Only this thread sends."""
        waker, done = Waker(), deque[tuple[int, Future[Any]]]()

        def on_done(number: int, result: Future[Any]) -> None:
            done.append((number, result))
            waker.wake()

        with loaded:
            while True:
                readable = [channel.socket.fileno(), waker.fileno()]
                ready, _, _ = select.select(readable, [], [], beat_s)
                if waker.fileno() in ready:
                    waker.clear()
                for call in channel.receive():
                    self.submit(call).add_done_callback(partial(on_done, call["id"]))
                while done:
                    number, result = done.popleft()
                    channel.send({"id": number, **self.answer(result.result())})
                if time.monotonic() - channel.last_sent >= beat_s:
                    self.check()
                    channel.send({"alive": True})
