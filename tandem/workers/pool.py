"""The workers of a pool and its thread, which starts, reaches, hears, and ends them.

    the pool's thread                              a worker, in any Host
    -----------------                              ---------------------
    _begin         open_host, {"start": ...}  -->  serve.py: load
    _listen        _on_message               <--   {"ready": true}, {"alive": true}, answers
      silence or the end of the channel: _lose

Silence counts only while the pool listens, and not while its thread is busy. calls.py is the pool
of calls with an answer each; rollout_workers/pool.py that of requests by versions of the weights.
Knows neither calls nor what is started again.
"""

import math
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from tandem.runtime import watchdog
from tandem.workers.channel import Channel, Message, ProtocolError, Waker
from tandem.workers.host import HERE, Host, OpenHost

BEATS = 4  # signs of life at least in silent_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of what a pool puts up with, in seconds and counts.

    silent_s: without a sign of life, until a worker is lost. start_s: until one is ready. restarts:
    workers that may be lost; calls.py counts them anew with each answer. losses: workers that are
    lost with a call until it fails.
    """

    silent_s: float = math.inf
    start_s: float = math.inf
    restarts: int = 3
    losses: int = 3

    @property
    def beat_s(self) -> float:
        """Time between two signs of life."""
        return min(1.0, self.silent_s / BEATS)


class RestartLimit:
    """A count of lost workers; the one after `limit` ends the run, or the pool."""

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0

    def spend(self) -> bool:
        """Count a lost worker; return False if no restart was left."""
        left = self.used < self.limit
        self.used += left
        return left

    def reset(self) -> None:
        """Forget the losses so far, as the workers make progress again."""
        self.used = 0


class Worker:
    """A worker of a pool: its process, and its channel once it has connected."""

    def __init__(self, role: str, number: int, host: Host):
        self.role, self.number, self.host = role, number, host
        self.connection: Channel | None = None
        self.ready = False  # it said so
        self.silent_s = 0.0  # time that the pool listened since the last sign of life
        self.num_done = 0

    @property
    def channel(self) -> Channel:
        """Its channel, once it has connected."""
        assert self.connection is not None
        return self.connection

    @property
    def pid(self) -> int:
        return self.host.pid

    @property
    def state(self) -> str:
        return "idle" if self.ready else "starting"

    def describe(self) -> dict[str, Any]:
        """Describe where it runs and what it does, for `tandem status`."""
        return {
            "role": f"{self.role} {self.number}",
            "node": self.host.node,
            "pid": self.pid,
            "state": self.state,
            "requests": self.num_done,
        }

    def __str__(self) -> str:
        place = "" if self.host.node == HERE else f" on {self.host.node}"
        return f"{self.role} {self.number} (process {self.pid}{place})"


W = TypeVar("W", bound=Worker)


class Pool(Generic[W]):
    """Workers and the thread that serves them. open_host: starts a worker's process. report: told
    of those that join, leave or are lost. clock: monotonic seconds.

    Any thread may call the methods above "the thread", and `wake`. thread: its name.
    """

    role: ClassVar[str]
    thread: ClassVar[str]

    def __init__(
        self,
        open_host: OpenHost,
        limits: Limits,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.limits, self._open_host, self._report, self._clock = limits, open_host, report, clock
        self._workers: dict[int, W] = {}
        self._listened = clock()
        self._selector, self._waker = selectors.DefaultSelector(), Waker()
        self._selector.register(self._waker, selectors.EVENT_READ)
        self.wake = self._waker.wake  # ends the wait of `_listen`
        self._ending, self._over = threading.Lock(), False
        self._broken: BaseException | None = None  # what has ended the thread
        self._thread = threading.Thread(target=self._run, name=self.thread, daemon=True)

    def start(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    @property
    def workers(self) -> list[W]:
        return list(self._workers.values())

    def status(self) -> list[dict[str, Any]]:
        """Describe each worker, for `tandem status`."""
        return [worker.describe() for _, worker in sorted(self._workers.copy().items())]

    def close(self) -> None:
        """End every worker now, what it was asked for unanswered, and the thread. A second call
        does nothing."""
        with self._ending:
            self._over = True
        self.wake()
        with watchdog.waiting_for(self.thread, "the end of its workers"):
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def require_open(self) -> None:
        """Raise RuntimeError if the pool has ended, or soon will, or the error that has ended
        it."""
        if isinstance(self._broken, Exception):
            raise self._broken
        if self._over:
            raise RuntimeError(f"the {self.role}s are closed") from self._broken

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        """Make steps until `close` is called."""
        error: BaseException = RuntimeError(f"the {self.role}s are closed")
        try:
            while not self._over:
                self.step()
        except BaseException as broken:
            error = self._broken = broken
        finally:
            with self._ending:
                self._over = True
            self._give_up(error)
            self._end_all()

    def _end_all(self) -> None:
        while self._workers:
            self._workers.popitem()[1].host.end()
        self._selector.close()
        self._waker.close()

    # ---------------------------------------------------------------- a subclass's matter

    def step(self) -> None:
        """Do what there is to do, and wait."""
        raise NotImplementedError

    def _give_up(self, error: BaseException) -> None:
        """Fail what is unanswered, as the pool has ended."""

    def _make(self, number: int, host: Host) -> W:
        """Make the worker of a process."""
        raise NotImplementedError

    def _start_of(self, worker: W) -> Message:
        """Return what a worker is to load."""
        raise NotImplementedError

    def _on_message(self, worker: W, message: Message) -> None:
        """Handle a message. Raises ProtocolError if it is no answer."""
        raise NotImplementedError

    def _lose(self, worker: W, reason: str) -> None:
        """Handle the loss of a worker."""
        raise NotImplementedError

    # ---------------------------------------------------------------- workers

    def _begin(self, number: int) -> None:
        """Start a worker."""
        worker = self._workers[number] = self._make(number, self._open_host(number))
        self._connect(worker)

    def _connect(self, worker: W) -> None:
        """Have a worker load if it has connected."""
        try:
            if (connection := worker.host.connect()) is None:
                return
        except EOFError:
            self._lose(worker, worker.host.how_it_ended())
            return
        worker.connection = connection
        self._selector.register(connection.socket, selectors.EVENT_READ, worker)
        self._send(worker, {"start": {**self._start_of(worker), "beat_s": self.limits.beat_s}})

    def _end(self, worker: W) -> None:
        """End a worker, and forget it."""
        del self._workers[worker.number]
        if worker.connection is not None:
            self._selector.unregister(worker.connection.socket)
        worker.host.end()

    def _is_current(self, worker: W) -> bool:
        return self._workers.get(worker.number) is worker

    # ---------------------------------------------------------------- to and from a worker

    def _send(self, worker: W, message: Message, *descriptors: int) -> None:
        worker.channel.send(message, *descriptors)
        self._flush(worker)

    def _flush(self, worker: W) -> None:
        worker.channel.flush()
        unsent = selectors.EVENT_WRITE if worker.channel.has_unsent else 0
        self._selector.modify(worker.channel.socket, selectors.EVENT_READ | unsent, worker)

    def _listen(self, seconds: float | None) -> None:
        """Wait for messages, at most that long, and handle them; lose silent workers."""
        for worker in [one for one in self.workers if one.connection is None]:
            self._connect(worker)
        for key, events in self._selector.select(seconds):
            if (worker := key.data) is None:
                self._waker.clear()
                continue
            if events & selectors.EVENT_READ and self._is_current(worker):
                self._read(worker)
            if events & selectors.EVENT_WRITE and self._is_current(worker):
                self._flush(worker)
        now = self._clock()
        passed, self._listened = min(now - self._listened, self.limits.beat_s), now
        for worker in self.workers:
            worker.silent_s += passed
            if worker.silent_s > self.limits.silent_s and self._is_current(worker):
                stack = worker.host.stack() or "it has no stack: it was stopped, or had not begun"
                self._lose(worker, f"no sign of life for {self.limits.silent_s:g} s\n{stack}")

    def _read(self, worker: W) -> None:
        """Handle what a worker has sent."""
        worker.silent_s = 0.0
        try:
            for message in worker.channel.receive():
                self._on_message(worker, message)
                if not self._is_current(worker):  # its channel is closed
                    return
        except ProtocolError as error:
            self._lose(worker, f"it wrote what is {error}")
        except EOFError:
            self._lose(worker, worker.host.how_it_ended())
