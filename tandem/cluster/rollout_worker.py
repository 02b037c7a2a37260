"""The process of a rollout worker on a node of a cluster: a connection to the driver, and weights
that come beside it. Does not know Ray, whose actor it is (ray_cluster.py).
"""

import os
import socket
import sys
import threading
import traceback
import warnings
from collections import deque

from torch import Tensor

from tandem.cluster.listener import CONNECT_S
from tandem.cluster.logs import redirect_output
from tandem.engine.worker_pool.protocol import MAX_LINE_BYTES
from tandem.engine.worker_pool.worker import Receive, load_engine, run
from tandem.runtime.worker_channel import Channel, Message
from tandem.types import Array
from tandem.weights.shared import Layout

TAKE_S = 600.0  # for weights to reach a node


class RolloutWorker:
    """A process on a node that runs engine/worker_pool/worker.py; Ray calls its methods."""

    def __init__(self) -> None:
        self._taken: dict[int, Array] = {}  # weights, by the number that an offer names
        self._change = threading.Condition()
        self._thread = 0

    def serve(self, address: tuple[str, int], handshake: Message) -> None:
        """Serve the pool at that address until the connection ends. handshake: with the way of a
        log, None for none."""
        self._thread = threading.get_ident()
        if (log := handshake.pop("log")) is not None:
            redirect_output(log)
        connection = socket.create_connection(address, CONNECT_S)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(connection, MAX_LINE_BYTES)
        channel.send({**handshake, "pid": os.getpid()})
        try:
            run(channel, load_engine, self._receiver)
        except Exception:
            traceback.print_exc()  # Ray only tells the driver
            raise

    def take(self, number: int, buffer: Array) -> None:
        """Take weights, which Ray has mapped here: uint8, the bytes of the tensors offered."""
        with self._change:
            self._taken[number] = buffer
            self._change.notify_all()

    def stack(self) -> str:
        """Return what `serve` is doing, innermost call first."""
        frame = sys._current_frames().get(self._thread)
        calls = reversed(traceback.extract_stack(frame)) if frame else ()
        return "\n".join(f'File "{c.filename}", line {c.lineno} in {c.name}' for c in calls)

    def _receiver(self, layout: Layout) -> Receive:
        def receive(source: Message, descriptors: deque[int]) -> dict[str, Tensor]:
            number = source["object"]
            with self._change:
                if not self._change.wait_for(lambda: number in self._taken, TAKE_S):
                    raise RuntimeError(f"the weights did not come within {TAKE_S:g} s")
                buffer = self._taken.pop(number)
            with warnings.catch_warnings():  # the pages are read only, and are only read
                warnings.simplefilter("ignore")
                return dict(layout.only(source["names"]).views(buffer))

        return receive
