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

from concurrent.futures import wait
from contextlib import suppress
from queue import Empty, SimpleQueue

import numpy as np

from tandem.engine.dispatch import RequestQueue, Ticket
from tandem.rollout_workers.pool import WAIT_S, Gaps, Workers
from tandem.runtime import watchdog
from tandem.types import Request


class Client:
    """One caller of a pool. Implements types.Generate for one thread. number: orders clients with
    the same version. checks: it asks for `logprob_gap` after each version."""

    def __init__(self, pool: Workers, number: int = 0, *, checks: bool = True):
        self.longest = pool.longest
        self._pool, self._number, self._checks = pool, number, checks
        self._queue: RequestQueue | None = None
        self._version, self._gaps = -1, Gaps()  # of the last `apply`, and of checks since
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
        self._version, self._gaps = version, (gaps := Gaps())
        self._open()
        if self._checks:
            self._pool.post(lambda: self._pool.watch(version, gaps))

    def _open(self) -> RequestQueue:
        pool, version = self._pool, self._version
        self._queue = pool.call(lambda: pool.dispatcher.open(version, self._number, self._ended))
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
            self._pool.post(lambda: [*map(self._pool.dispatcher.add, tickets)])
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
            self._pool.post(lambda: self._pool.dispatcher.close(queue))

    def logprob_gap(self) -> float:
        """Return the largest Engine.logprob_gap of the workers that have run the version of the
        last `apply` since, and are up."""
        version, gaps, pool = self._version, self._gaps, self._pool
        pool.call(lambda: pool.ask(version, gaps))
        with watchdog.waiting_for("rollout workers", "their log-probs"):
            while wait(gaps, WAIT_S).not_done:
                self._look()
        # numpy lets a NaN show
        return float(np.max([gap.result() for gap in gaps], initial=0.0))

    def try_out(self, version: int) -> float:
        """Have all workers run the published weights of that version, and then none, so that what
        cannot run shows at the start. Returns logprob_gap; raises UserError as `step` does."""
        self.apply(version)
        with watchdog.waiting_for("rollout workers", "their first weights"):
            while not all(worker.runs_target for worker in self._pool.workers):
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
