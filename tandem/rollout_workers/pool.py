"""Rollout workers: requests go to engines in processes of their own. Implements types.Generate.

    caller's thread                                        worker process 0 .. count - 1 (worker.py)
    ---------------                                        ---------------------------------------
    submit(request)  -> its queue                           one thread, one engine, own weights
    step()  _dispatch     queue -> tickets of a worker --> {"request": 7}: submit, Engine.step
            _on_message    completion, signs of life  <--  {"completion": 7}, {"alive": true}
            _lose      silence: SIGKILL, a new worker, its tickets back in front
    _dispatch              weights of open queues     -->  receive, load, hash
            _on_applied    it must be the trainer's   <--  {"applied": 4, "hash": "9f86..."}
              or once more, then a new worker         <--  {"applied": 4, "failed": "..."}

step waits for the workers' sockets, at most WAIT_S, as its caller may have more to submit; apply
waits until the first worker runs the weights, or none that is up is left; nothing else waits. Both
go on after an answer, the end of a socket, or silence beyond the limit, and then kill the worker.

A worker is starting, then syncing (it loads a version), and gets requests of that version only
after its hash was right. dispatch.py decides who runs which version and gets which request. A
request of a lost worker goes to another unchanged, with the address of its draws, so the completion
has the same bits; chance decides only which worker makes it.

One thread at a time calls this: a caller with one version after the other (`apply`, `submit`), or
client.py's thread for several, with a queue of `dispatcher` each. Any thread may call `close`,
`wake` and `status`. On Linux workers of this machine end with the thread that started the first.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tandem.engine.dispatch import (
    Dispatcher,
    RequestQueue,
    Ticket,
    cancelled_completion,
    check_completion,
)
from tandem.rollout_workers.checks import Check, Checks
from tandem.rollout_workers.process import EngineSpec, Published, WorkerProcess
from tandem.rollout_workers.protocol import read_completion, request_message
from tandem.runtime import watchdog
from tandem.runtime.errors import UserError
from tandem.types import Request
from tandem.workers.channel import Message, ProtocolError, read_error
from tandem.workers.host import Host, OpenHost
from tandem.workers.pool import Limits, Pool, RestartLimit

WAIT_S = 0.05  # in one step


class Workers(Pool[WorkerProcess]):
    """Pool of rollout workers, a context; weights reach them with the first `apply`.

    spec: of each one's engine. limits.restarts: most workers that may be lost; the next one ends
    the run with a UserError. Others are those of Pool.
    """

    role = "rollout worker"

    def __init__(
        self,
        spec: EngineSpec,
        weights: Published,
        open_host: OpenHost,
        *,
        count: int,
        limits: Limits,
        report: Callable[[str], None],
    ):
        super().__init__(open_host, limits, report)
        self.longest, self.restarts = spec.longest, RestartLimit(limits.restarts)
        self.on_life: Callable[[], None] = watchdog.heartbeat  # a worker is at work
        self.dispatcher: Dispatcher[WorkerProcess] = Dispatcher(spec.max_batch, spec.longest)
        self._queue: RequestQueue | None = None  # of `apply` and `submit`
        self._spec, self._weights = spec, weights
        self._ended: list[Ticket] = []
        self.checks = Checks(self._send)
        self._lost: Counter[int] = Counter()  # restarts, by the worker's number
        for number in range(count):
            self._begin(number)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # ---------------------------------------------------------------- Generate

    @property
    def weight_version(self) -> int:
        """Version of `apply`; -1: none yet."""
        return -1 if self._queue is None else self._queue.version

    def apply(self, version: int) -> None:
        """Run the published weights of that version from now on. No request may be under way.

        Returns once one worker serves. Raises UserError, as `step` does, for other weights.
        """
        given = [ticket for one in self.workers for ticket in one.tickets.values()]
        if self.dispatcher.num_waiting or any(ticket.completion is None for ticket in given):
            raise RuntimeError(f"weights of version {version} come while requests are under way")
        up = [worker for worker in self.workers if worker.ready]
        if self._queue is not None:
            self.dispatcher.close(self._queue)
        self._queue = self.dispatcher.open(version)
        self._dispatch()
        with watchdog.waiting_for("rollout workers", f"the hash of weights {version}"):
            while (left := [worker for worker in up if self._is_current(worker)]) and not any(
                worker.is_ready and worker.version == version for worker in left
            ):
                self._poll()

    def submit(self, request: Request) -> Ticket:
        """Take a request. Raises UserError if no engine has room for it."""
        assert self._queue is not None
        self.dispatcher.add(ticket := self.dispatcher.ticket(request, self._queue))
        return ticket

    def step(self) -> list[Ticket]:
        """Wait a moment for requests to end; return those that have."""
        self._require_open()
        self._dispatch()
        if not self._ended:
            self._poll()
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, ticket: Ticket) -> None:
        """End a request now, with an empty completion; an ended one stays as it is."""
        if ticket.completion is not None:
            return
        ticket.completion = cancelled_completion()
        with suppress(ValueError):  # a worker has it
            ticket.queue.waiting.remove(ticket)
        for worker in self._workers.values():
            if ticket.number in worker.tickets:
                self._send(worker, {"cancel": ticket.number})

    def logprob_gap(self) -> float:
        """Return the largest Engine.logprob_gap of the workers that are up and stay so."""
        self.checks.ask(check := Check(self.weight_version), self.workers)
        with watchdog.waiting_for("rollout workers", "their log-probs"):
            while check.num_asked:
                self._poll()
        return check.gap

    def try_out(self, version: int) -> float:
        """Have all workers run the published weights of that version, and then none, so that what
        cannot run shows at the start. Returns logprob_gap; raises UserError as `step` does."""
        self._queue = self.dispatcher.open(version)
        with watchdog.waiting_for("rollout workers", "their first weights"):
            while not all(worker.is_ready for worker in self.workers):
                self._poll()
        gap = self.logprob_gap()
        self.dispatcher.close(self._queue)
        self._queue = None
        for worker in self.workers:
            worker.target = worker.version = -1
        return gap

    # ---------------------------------------------------------------- their number

    def resize(self, count: int) -> None:
        """Start or end workers until there are count; the requests of those that end go to
        others."""
        for number in sorted(self._workers)[count:]:
            self._remove(self._workers[number])
        for number in range(len(self._workers), count):
            self._begin(number)

    @property
    def count(self) -> int:
        return len(self._workers)

    def status(self) -> list[dict[str, Any]]:
        """Describe each worker: where it runs and what it does. Any thread may ask."""
        numbers = sorted(self._workers.copy())
        rows = zip(numbers, super().status(), strict=False)
        return [{**row, "restarts": self._lost[number]} for number, row in rows]

    # ---------------------------------------------------------------- to a worker

    def _dispatch(self) -> None:
        """Have workers load the weights, and send them the requests, that are theirs now."""
        for version, movers in self.dispatcher.switches(self.workers).items():
            self._sync(version, movers)
        for worker, ticket in self.dispatcher.assign(self.workers):
            self._send(worker, request_message(ticket.number, ticket.request))

    def _sync(self, version: int, workers: Sequence[WorkerProcess]) -> None:
        """Offer the weights to workers; what they run is unknown until the hash is right."""
        for worker in workers:
            self.checks.leave(worker)
        offers = self._weights.offer(version, workers)
        for worker, (source, descriptor) in zip(workers, offers, strict=True):
            worker.note_offer(version)
            beside = () if descriptor < 0 else (descriptor,)
            self._send(worker, {"apply": version, "from": source}, *beside)

    # ---------------------------------------------------------------- processes

    def _make(self, number: int, host: Host) -> WorkerProcess:
        return WorkerProcess(number, host)

    def _start_of(self, worker: WorkerProcess) -> Message:
        return {**self._spec.start_of(worker.number), "layout": self._weights.layout.parts}

    def _remove(self, worker: WorkerProcess) -> int:
        """End a worker, and forget it; return how many of its requests are served again."""
        self._end(worker)
        self.checks.lose(worker)
        return self.dispatcher.put_back(worker)

    def _lose(self, worker: WorkerProcess, reason: str) -> None:
        """Kill a worker, start another in its place, and put its requests back in front."""
        lost = f"{worker} was lost while {worker.state}: {reason}"
        last_words = worker.host.last_words()
        back = self._remove(worker)
        self._lost[worker.number] += 1
        if not self.restarts.spend():
            raise UserError(
                "rollout workers end again and again",
                where=lost,
                found=last_words,
                expected=f"at most {self.restarts.limit} restarts in a run (rollout.restarts)",
                next="look at what the worker wrote last; the same command resumes the run",
            )
        words = [line for line in last_words.splitlines() if line.strip() not in lost]
        self._report(
            f"{lost}; restart {self.restarts.used} of {self.restarts.limit}, "
            f"{back} of its requests are served again"
            + "\n".join(["; last words:", *words] if words else [])
        )
        self._begin(worker.number)

    def _poll(self) -> None:
        """Wait for an event, handle it, and dispatch requests."""
        self._listen(WAIT_S)
        self._dispatch()

    # ---------------------------------------------------------------- from a worker

    def _on_message(self, worker: WorkerProcess, message: Message) -> None:
        if message != {"alive": False}:  # it is at work
            self.on_life()
        match message:
            case {"alive": bool()}:
                pass
            case {"ready": True} if not worker.ready:
                worker.ready = True
            case {"applied": int(version)} if worker.syncing and version == worker.syncing[0]:
                worker.syncing.popleft()
                if not worker.syncing:  # else another one was sent meanwhile
                    self._on_applied(worker, version, message)
            case {"completion": int(number), "identity": str(identity)} if number in worker.tickets:
                self._on_completion(worker, worker.tickets[number], identity, message)
            case {"cancelled": int(number)} if (
                number in worker.tickets and worker.tickets[number].completion
            ):
                del worker.tickets[number]
            case {"checked": int(), "gap": float(gap)}:
                self.checks.answer(worker, gap)
            case {"error": {"what": _}}:
                raise read_error(message)
            case _:
                raise ProtocolError(f"not an answer: {str(message)[:200]}")

    def _on_applied(self, worker: WorkerProcess, version: int, message: Message) -> None:
        if version not in self.dispatcher.versions:  # its memory may have been written again
            worker.target = -1
            return
        expected = self._weights.hash_of(version)
        match message:
            case {"hash": str(digest), "differ": list(names)}:
                if digest != expected:
                    where = f"{worker}, weight version {version}"
                    raise UserError(
                        "the engine's weights differ from the trainer's",
                        where=f"{where}: {', '.join(names)}" if names else where,
                        found=digest,
                        expected=expected,
                        next="no token was sampled with them; the same command resumes the run",
                    )
                worker.version = version
                self._weights.loaded(version, time.monotonic() - worker.offered_at)
            case {"failed": str(reason)} if worker.retried != version:
                self._report(f"{worker} did not get weights {version}, and tries again: {reason}")
                worker.retried = version
                self._sync(version, [worker])
            case _:
                reason = message.get("failed", str(message)[:200])
                self._lose(worker, f"it did not get weights {version}: {reason}")

    def _on_completion(
        self, worker: WorkerProcess, ticket: Ticket, identity: str, message: Message
    ) -> None:
        completion = read_completion(message)
        where = f"{worker}, request {ticket.number}"
        check_completion(where, ticket, identity, completion)
        del worker.tickets[ticket.number]
        worker.num_done += 1
        if ticket.completion is None:  # else it was cancelled meanwhile
            ticket.completion = completion
            self._ended.append(ticket)
