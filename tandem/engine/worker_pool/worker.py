"""A rollout worker: a process with a model, an engine and one torch thread, which serves whoever
started it.

    socket --> "start" --> load model and tokenizer --> "ready" --> +--> "apply": map, load, hash --> "applied"
                                                                    |    "request": Engine.submit
                                                                    |    Engine.step --> "completion"
                                                                    +--- a sign of life, and look at the socket

Standard input is the socket (worker_wire.py has the messages), standard output is the standard
error of whoever started it, and standard error a file that is quoted should it crash. One thread
does all of it, so a sign of life says that the engine itself goes on; only while the process starts
or loads weights, which is one long call, a second thread gives it, and for a bounded time. It ends
when the socket does, and on Linux with whoever started it. It knows no problem, no reward, and no
other worker.

    python -m tandem.engine.worker_pool.worker PARENT_PID < SOCKET      (workers.py starts it)
"""

import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from tandem.engine.worker_pool.protocol import (
    Message,
    completion_message,
    decode,
    encode,
    error_message,
    identity_of,
    read_request,
)
from tandem.runtime import numerics
from tandem.runtime.errors import UserError

if TYPE_CHECKING:  # torch is imported when there are signs of life already
    from tandem.engine.engine import Engine
    from tandem.engine.scheduler import RunningSequence

LONG_CALL_S = 600.0  # after which starting, or loading weights, gives no more signs of life
_PR_SET_PDEATHSIG = 1
_CHUNK = 1 << 20


class Channel:
    """The worker's end of the socket. Writing waits until there is room, as the other side may be
    busy for long."""

    def __init__(self, connection: socket.socket):
        self.descriptors: deque[int] = deque()  # that came and were not asked for yet
        self._socket, self._rest, self._said = connection, b"", time.monotonic()

    def receive(self, wait_s: float) -> list[Message]:
        """What has come, after waiting for something at most that long. Raises EOFError when the
        other side is gone."""
        lines: list[bytes] = []
        while not lines and select.select([self._socket], [], [], wait_s)[0]:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK, 16)
            self.descriptors += descriptors
            if not data:
                raise EOFError
            *lines, self._rest = (self._rest + data).split(b"\n")
        return [decode(line) for line in lines]

    def send(self, message: Message) -> None:
        self._said = time.monotonic()
        self._socket.sendall(encode(message))

    def live(self, beat_s: float, busy: bool) -> None:
        """Give a sign of life, unless something was said a moment ago."""
        if time.monotonic() - self._said >= beat_s:
            self.send({"alive": busy})

    @contextmanager
    def long_call(self, beat_s: float) -> Iterator[None]:
        """Signs of life from another thread, while this one is in a call that takes long and sends
        nothing itself."""
        over = threading.Event()

        def beat() -> None:
            ends = time.monotonic() + LONG_CALL_S
            with suppress(OSError):  # whoever started us is gone
                while not over.wait(beat_s) and time.monotonic() < ends:
                    self.send({"alive": True})

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


class Server:
    """Serves a channel with an engine until the channel ends. layout: of the weights that come."""

    def __init__(self, channel: Channel, engine: "Engine", layout: list[Any], beat_s: float):
        self._channel, self._engine, self._layout, self._beat_s = channel, engine, layout, beat_s
        self._running: dict[int, RunningSequence] = {}
        self._numbers: dict[RunningSequence, int] = {}

    def serve(self) -> None:
        """Raises EOFError when the other side is gone."""
        while True:
            for message in self._channel.receive(0.0 if self._engine.has_work else self._beat_s):
                self._obey(message)
            if self._engine.has_work:
                for running in self._engine.step():
                    self._answer(running)
            self._channel.live(self._beat_s, self._engine.has_work)

    def _obey(self, message: Message) -> None:
        match message:
            case {"request": int(number)}:
                running = self._engine.submit(read_request(message))
                self._running[number], self._numbers[running] = running, number
            case {"cancel": int(number)}:
                self._cancel(number)
            case {"check": int(version)}:
                with self._channel.long_call(self._beat_s):
                    gap = self._engine.logprob_gap()
                self._channel.send({"checked": version, "gap": gap})
            case {"apply": int(version)}:
                self._apply(version, self._channel.descriptors.popleft())
            case _:
                raise RuntimeError(f"no such message: {message}")

    def _answer(self, running: "RunningSequence") -> None:
        """The identity is made of the request as the engine had it."""
        if running.completion is not None:
            number = self._numbers.pop(running)
            del self._running[number]
            self._channel.send(
                completion_message(number, identity_of(running.request), running.completion)
            )

    def _cancel(self, number: int) -> None:
        # else its completion is on the way
        if (running := self._running.pop(number, None)) is not None:
            del self._numbers[running]
            self._engine.cancel(running)
            self._channel.send({"cancelled": number})

    def _apply(self, version: int, descriptor: int) -> None:
        from tandem.weights.mapped import Layout, read_tensors

        if self._running:
            raise RuntimeError(
                f"weights of version {version} came while {len(self._running)} requests run"
            )
        with self._channel.long_call(self._beat_s):
            weights = read_tensors(Layout.from_json(self._layout), descriptor)
            os.close(descriptor)
            self._engine.apply(version, lambda: self._engine.model.load_weights(weights))
            digest = self._engine.weight_hash()
        self._channel.send({"applied": version, "hash": digest})


def load_engine(start: dict[str, Any]) -> "Engine":
    """The engine of a model directory, without an adapter: published weights are merged."""
    numerics.prepare(threads=1)
    from tandem.engine.engine import Engine
    from tandem.model.load import load_model
    from tandem.model.tokenizer import decode_text, load_tokenizer

    model, tokenizer = load_model(start["model_path"]), load_tokenizer(start["model_path"])
    size = start["max_batch"]
    return Engine(
        model,
        lambda tokens: decode_text(tokenizer, tokens),
        cache_bytes=start["cache_bytes"],
        max_batch=size,
        max_queue=size,
    )


def run(channel: Channel, load: "Callable[[dict[str, Any]], Engine]" = load_engine) -> None:
    """From the message that starts it to the end of the channel. A UserError is told to the other
    side."""
    try:
        messages: list[Message] = []
        while not messages:
            messages = channel.receive(LONG_CALL_S)
        [start] = [message["start"] for message in messages]
        with channel.long_call(start["beat_s"]):
            engine = load(start)
        channel.send({"ready": True})
        Server(channel, engine, start["layout"], start["beat_s"]).serve()
    except UserError as error:
        channel.send(error_message(error))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # whoever started us is gone
        return


def prepare(parent: int) -> Channel:
    """Make this process a worker of that one: it ends with it, and the terminal's Ctrl-C is not for
    it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=1, all_threads=True)  # for the watchdog's report
    # for Workers', see worker_process.Process.stack
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    return Channel(socket.socket(fileno=os.dup(0)))


if __name__ == "__main__":
    run(prepare(int(sys.argv[1])))
