"""One pool of rollout workers for several callers at once, each in a thread of its own: rollouts of
several steps, each by its own version of the weights.

    a step's thread, with a Client              the thread "rollout workers", of PoolThread
    ------------------------------              -------------------------------------------
    apply(version)   opens a queue       ---->  it alone calls Workers:
    submit, step     hands its requests  ---->    what was asked of it, then Workers.step, again and
    step             waits for tickets   <----    again: dispatches, listens
    rest             closes the queue    ---->
    logprob_gap      waits for answers   <----  a check of every worker that ran the version

A call to the pool waits for that thread, which waits for workers, at most pool.WAIT_S, and is woken
by calls. An error of the pool ends its thread, and every caller raises it. `Client.step` waits at
most WAIT_S; it passes on the workers' signs of life, as its thread is the one that waits for them.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from tandem.engine.dispatch import RequestQueue, Ticket
from tandem.rollout_workers.checks import Check
from tandem.rollout_workers.pool import WAIT_S, Workers
from tandem.runtime import watchdog
from tandem.types import Request

LOOK_S = 0.002  # between two looks whether the workers have made a check
END_S = 3.0  # for the pool's thread to end, once the workers are closed

T = TypeVar("T")


class PoolThread:
    """A thread that runs Workers for several clients; a context. checks: clients will ask for
    `logprob_gap`."""

    def __init__(self, workers: Workers, checks: bool):
        self.workers, self.checks = workers, checks
        self.last_life = time.monotonic()  # of a worker at work
        workers.on_life = self._note_life
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._ended: dict[RequestQueue, SimpleQueue[Ticket]] = {}
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="rollout workers", daemon=True)
        self._thread.start()

    def __enter__(self) -> "PoolThread":
        return self

    def __exit__(self, *_: Any) -> None:
        self.workers.close()
        self._thread.join(END_S)

    def client(self, number: int) -> "Client":
        """Make the client of a caller; numbers order those with the same version."""
        return Client(self, number)

    @property
    def count(self) -> int:
        return self.workers.count

    def status(self) -> list[dict[str, Any]]:
        """Describe each worker, as Workers.status."""
        return self.workers.status()

    def resize(self, count: int) -> None:
        """Start or end workers until there are count, as Workers.resize."""
        self.call(lambda: self.workers.resize(count))

    def call(self, function: Callable[[], T]) -> T:
        """Have the thread call a function; return its result. Raises its error, or the pool's."""
        future = self.post(function)
        while True:
            with suppress(TimeoutError):
                return future.result(WAIT_S)
            self.raise_error()

    def post(self, function: Callable[[], T]) -> "Future[T]":
        """Have the thread call a function soon."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        self.workers.wake()
        return future

    def raise_error(self) -> None:
        """Raise the error that has ended the thread, if it has."""
        if self._error is not None:
            raise self._error

    # The thread.

    def open(self, number: int, check: Check, ended: "SimpleQueue[Ticket]") -> RequestQueue:
        """Open a queue by the version of a check; `ended` gets its tickets."""
        queue = self.workers.dispatcher.open(check.version, number)
        self._ended[queue] = ended
        if self.checks:
            self.workers.checks.watch(check)
        return queue

    def close(self, queue: RequestQueue) -> None:
        """Close a queue whose requests have ended."""
        self.workers.dispatcher.close(queue)
        del self._ended[queue]

    def enqueue(self, tickets: Sequence[Ticket]) -> None:
        """Let tickets wait in their queues."""
        for ticket in tickets:
            self.workers.dispatcher.add(ticket)

    def ask(self, check: Check) -> None:
        """Have the workers that still run its version make a check."""
        self.workers.checks.forget(check)
        self.workers.checks.ask(check, self.workers.workers)

    def _run(self) -> None:
        try:
            while True:
                with suppress(Empty):
                    while True:
                        _do(*self._calls.get_nowait())
                for ticket in self.workers.step():
                    if (ended := self._ended.get(ticket.queue)) is not None:
                        ended.put(ticket)
        except Exception as error:  # every caller raises it
            self._error = error

    def _note_life(self) -> None:
        self.last_life = time.monotonic()


def _do(future: "Future[Any]", function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except Exception as error:  # the caller raises it
        future.set_exception(error)


class Client:
    """One caller of a pool: requests by one version of the weights at a time. Implements
    types.Generate for one thread."""

    def __init__(self, pool: PoolThread, number: int):
        self.longest = pool.workers.longest
        self._pool, self._number = pool, number
        self._queue: RequestQueue | None = None
        self._check = Check(-1)
        self._asked: list[Ticket] = []  # not handed over yet: a step's requests go together
        self._ended: SimpleQueue[Ticket] = SimpleQueue()
        self._last_life = pool.last_life

    @property
    def weight_version(self) -> int:
        """Version that its requests are served by; -1 while it rests."""
        return -1 if self._queue is None else self._queue.version

    def apply(self, version: int) -> None:
        """Have requests served by the published weights of that version from now on. No request of
        this client may be under way."""
        self.rest()
        pool, check = self._pool, Check(version)
        self._queue = pool.call(lambda: pool.open(self._number, check, self._ended))
        self._check = check

    def submit(self, request: Request) -> Ticket:
        """Take a request. Raises UserError if no engine has room for it."""
        assert self._queue is not None
        ticket = self._pool.workers.dispatcher.ticket(request, self._queue)
        self._asked.append(ticket)
        return ticket

    def step(self) -> list[Ticket]:
        """Wait a moment for requests to end; return those that have."""
        if self._asked:
            tickets, self._asked = self._asked, []
            self._pool.post(lambda: self._pool.enqueue(tickets))
        ended = []
        with suppress(Empty):
            ended.append(self._ended.get(timeout=WAIT_S))
            while True:
                ended.append(self._ended.get_nowait())
        self._look()
        return ended

    def cancel(self, ticket: Ticket) -> None:
        """End a request soon, with an empty completion; an ended one stays as it is."""
        self._asked = [one for one in self._asked if one is not ticket]
        self._pool.post(lambda: self._pool.workers.cancel(ticket))

    def rest(self) -> None:
        """Ask for nothing until the next `apply`: its workers may take up other versions."""
        if self._queue is not None:
            queue, self._queue = self._queue, None
            self._pool.post(lambda: self._pool.close(queue))

    def logprob_gap(self) -> float:
        """Return the largest Engine.logprob_gap of the workers that have run the version of the
        last `apply` since, and are up."""
        check, pool = self._check, self._pool
        pool.call(lambda: pool.ask(check))
        with watchdog.waiting_for("rollout workers", "their log-probs"):
            while check.num_asked:
                time.sleep(LOOK_S)
                self._look()
        return check.gap

    def _look(self) -> None:
        """Raise the pool's error, if there is one, and pass on its signs of life."""
        self._pool.raise_error()
        if self._last_life != (last_life := self._pool.last_life):
            self._last_life = last_life
            watchdog.heartbeat()
