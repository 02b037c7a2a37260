"""A caller of the pool of rollout workers: rollouts of a step, by one version of the weights at a
time. Steps that are rolled out at once have a Client, and a thread, each.

    a step's thread, with a Client              the pool's thread (pool.py)
    ------------------------------              ---------------------------
    apply(version)   opens a queue       ---->  _dispatch, as soon as a worker runs the version
    submit, step     hands its requests  ---->
    step             waits for tickets   <----  _on_completion
    rest             closes the queue    ---->
    logprob_gap      waits for answers   <----  a check of every worker that ran the version

`Client.step` waits at most WAIT_S; it passes on the workers' signs of life to the watchdog, as its
thread is the one that waits for them.
"""

import time
from contextlib import suppress
from queue import Empty, SimpleQueue

from tandem.engine.dispatch import RequestQueue, Ticket
from tandem.rollout_workers.checks import Check
from tandem.rollout_workers.pool import WAIT_S, Workers
from tandem.runtime import watchdog
from tandem.types import Request

LOOK_S = 0.002  # between two looks whether the workers have made a check


class Client:
    """One caller of a pool. Implements types.Generate for one thread. number: orders clients with
    the same version. checks: it asks for `logprob_gap` after each version."""

    def __init__(self, pool: Workers, number: int = 0, *, checks: bool = True):
        self.longest = pool.longest
        self._pool, self._number, self._checks = pool, number, checks
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
        self._check = check = Check(version)
        self._open()
        if self._checks:
            self._pool.post(lambda: self._pool.checks.watch(check))

    def _open(self) -> RequestQueue:
        pool, version = self._pool, self._check.version
        self._queue = pool.call(lambda: pool.open(version, self._number, self._ended))
        return self._queue

    def submit(self, request: Request) -> Ticket:
        """Take a request, after a rest by the version of before. Raises UserError if no engine has
        room for it."""
        ticket = self._pool.dispatcher.ticket(request, self._queue or self._open())
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
        self._pool.post(lambda: self._pool.cancel(ticket))

    def rest(self) -> None:
        """Ask for nothing until the next `apply` or `submit`: its workers may take up other
        versions."""
        if self._queue is not None:
            queue, self._queue = self._queue, None
            self._pool.post(lambda: self._pool.close_queue(queue))

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

    def try_out(self, version: int) -> float:
        """Have all workers run the published weights of that version, and then none, so that what
        cannot run shows at the start. Returns logprob_gap; raises UserError as `step` does."""
        self.apply(version)
        with watchdog.waiting_for("rollout workers", "their first weights"):
            while not all(worker.is_ready for worker in self._pool.workers):
                self.step()
        gap = self.logprob_gap()
        self.rest()
        self._pool.call(self._pool.forget_versions)
        return gap

    def _look(self) -> None:
        """Raise the pool's error, if there is one, and pass on its signs of life."""
        self._pool.require_open()
        if self._last_life != (last_life := self._pool.last_life):
            self._last_life = last_life
            watchdog.heartbeat()
