"""Rollout workers: requests go to engines in processes of their own. Implements types.Generate.

    caller's thread                                        worker process 0 .. count - 1 (worker.py)
    ---------------                                        ---------------------------------------
    submit(request)  -> its queue                           one thread, one engine, own weights
    step()  _dispatch     queue -> tickets of a worker --> {"request": 7}: submit, Engine.step
            _on_message    completion, signs of life  <--  {"completion": 7}, {"alive": true}
            _check_heartbeats  silence: SIGKILL, a new worker, its tickets back in front
    _dispatch              weights of open queues     -->  receive, load, hash
            _on_applied    it must be the trainer's   <--  {"applied": 4, "hash": "9f86..."}
              or once more, then a new worker         <--  {"applied": 4, "failed": "..."}

step waits for the workers' sockets, at most WAIT_S, as its caller may have more to submit; apply
waits until the first worker runs the weights, or none that is up is left; nothing else waits. Both
go on after an answer, the end of a socket, or heartbeat_s without a sign of life, and then kill the
worker. Silence counts only while the pool listens, and not while the driver is busy.

A worker is starting, then syncing (it loads a version), and gets requests of that version only
after its hash was right. dispatch.py decides who runs which version and gets which request. A
request of a lost worker goes to another unchanged, with the address of its draws, so the completion
has the same bits; chance decides only which worker makes it.

One thread at a time calls this: a caller with one version after the other (`apply`, `submit`), or
client.py's thread for several, with a queue of `dispatcher` each. Any thread may call `close`,
`wake` and `status`. On Linux workers of this machine end with the thread that started the first.
"""

import selectors
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any

from tandem.engine.worker_pool import errors
from tandem.engine.worker_pool.checks import Check, Checks
from tandem.engine.worker_pool.dispatch import Dispatcher, RequestQueue, Ticket, devices_of
from tandem.engine.worker_pool.forked import LocalProcesses
from tandem.engine.worker_pool.process import Published, Spawn, WorkerProcess
from tandem.engine.worker_pool.protocol import (
    cancelled_completion,
    read_completion,
    read_error,
    request_message,
)
from tandem.model import custom_code
from tandem.runtime import watchdog
from tandem.runtime.worker_channel import Message, ProtocolError, RestartLimit, Waker
from tandem.types import Request

COMMAND = (sys.executable, "-m", "tandem.engine.worker_pool.worker")
WAIT_S = 0.05  # in one step
BEATS = 4  # signs of life at least in heartbeat_s


class Workers:
    """Pool of rollout workers, a context; weights reach them with the first `apply`.

    longest: most tokens of one sequence that an engine with cache_mb places, as Engine.longest.
    Worker n is on tensor_parallel of the devices, in turn; cache_mb, max_batch, splits, matmul: of
    each. release_cache: a worker rests once its step's check is made. restarts: most workers that
    may be lost; the next one ends the run with a UserError. report: told of losses. spawn: starts a
    worker's process; None: `command`, on this machine.
    """

    def __init__(
        self,
        *,
        model_path: str,
        devices: Sequence[str] = ("cpu",),
        dtype: str = "float32",
        splits: int = 1,
        tensor_parallel: int = 1,
        matmul: str = "plain",
        cache_mb: int,
        max_batch: int,
        longest: int,
        count: int,
        heartbeat_s: float,
        restarts: int,
        weights: Published,
        record_experts: bool = False,
        release_cache: bool = False,
        report: Callable[[str], None],
        command: Sequence[str] = COMMAND,
        forks: bool = True,
        spawn: Spawn | None = None,
    ):
        self.longest, self.restarts = longest, RestartLimit(restarts)
        self.on_life: Callable[[], None] = watchdog.heartbeat  # a worker is at work
        self.dispatcher: Dispatcher[WorkerProcess] = Dispatcher(max_batch, longest)
        self._queue: RequestQueue | None = None  # of `apply` and `submit`
        self._weights, self._report, self._heartbeat_s = weights, report, heartbeat_s
        self._local = LocalProcesses(command, model_path, forks)
        self._host = spawn or self._local.spawn
        self._beat_s, self._devices = min(1.0, heartbeat_s / BEATS), devices
        self._start: dict[str, Any] = {
            "model_path": model_path,
            "dtype": dtype,
            "splits": splits,
            "tensor_parallel": tensor_parallel,
            "matmul": matmul,
            "cache_bytes": cache_mb << 20,
            "max_batch": max_batch,
            "longest": longest,
            "layout": weights.layout.parts,
            "record_experts": record_experts,
            "release_cache": release_cache,
            "trust_remote_code": custom_code.is_allowed(),
            "beat_s": self._beat_s,
        }
        self._ended: list[Ticket] = []
        self.checks = Checks(self._send)
        self._polled = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()
        self.wake = self._waker.wake  # ends the wait of `step`
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._workers: dict[int, WorkerProcess] = {}
        self._lost: Counter[int] = Counter()  # restarts, by the worker's number
        self._closing, self._closed = threading.Lock(), False
        for number in range(count):
            self._spawn(number)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """End every worker now, its requests unanswered. A thread in `step` gets an error."""
        with self._closing, closing(self._local):
            self._closed = True
            while self._workers:
                self._workers.popitem()[1].host.end()
            self._selector.close()
            self._waker.close()

    # ---------------------------------------------------------------- Generate

    @property
    def weight_version(self) -> int:
        """Version of `apply`; -1: none yet."""
        return -1 if self._queue is None else self._queue.version

    def apply(self, version: int) -> None:
        """Run the published weights of that version from now on. No request may be under way.

        Returns once one worker serves. Raises UserError, as `step` does, for other weights.
        """
        given = [ticket for one in self._workers.values() for ticket in one.tickets.values()]
        if self.dispatcher.num_waiting or any(ticket.completion is None for ticket in given):
            raise RuntimeError(f"weights of version {version} come while requests are under way")
        up = [worker for worker in self._workers.values() if worker.started]
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
        if self._closed:
            raise RuntimeError("the rollout workers are closed")
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
            self._spawn(number)

    @property
    def workers(self) -> list[WorkerProcess]:
        return list(self._workers.values())

    @property
    def count(self) -> int:
        return len(self._workers)

    def status(self) -> list[dict[str, Any]]:
        """Describe each worker: where it runs and what it does. Any thread may ask."""
        return [
            {**worker.describe(), "restarts": self._lost[number]}
            for number, worker in sorted(self._workers.copy().items())
        ]

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
            self._send(worker, {"apply": version, "from": source}, descriptor)

    def _send(self, worker: WorkerProcess, message: Message, descriptor: int = -1) -> None:
        worker.channel.send(message, descriptor)
        self._flush(worker)

    def _flush(self, worker: WorkerProcess) -> None:
        worker.channel.flush()
        unsent = selectors.EVENT_WRITE if worker.channel.has_unsent else 0
        self._selector.modify(worker.channel.socket, selectors.EVENT_READ | unsent, worker)

    # ---------------------------------------------------------------- processes

    def _spawn(self, number: int) -> None:
        with self._closing:
            if self._closed:
                raise RuntimeError("the rollout workers are closed")
            worker = self._workers[number] = WorkerProcess(number, self._host(number))
        self._connect(worker)

    def _connect(self, worker: WorkerProcess) -> None:
        """Have a worker start if it has connected; replace it if it never will."""
        try:
            if (connection := worker.host.connect()) is None:
                return
        except EOFError:
            self._replace(worker, worker.host.how_it_ended())
            return
        with self._closing:
            if self._closed:
                raise RuntimeError("the rollout workers are closed")
            worker.connection = connection
            self._selector.register(connection.socket, selectors.EVENT_READ, worker)
        device = devices_of(worker.number, self._start["tensor_parallel"], self._devices)
        self._send(worker, {"start": {**self._start, "device": device}})

    def _remove(self, worker: WorkerProcess) -> int:
        """End a worker, and forget it; return how many of its requests are served again."""
        del self._workers[worker.number]
        if worker.connection is not None:
            self._selector.unregister(worker.connection.socket)
        worker.host.end()
        self.checks.lose(worker)
        return self.dispatcher.put_back(worker)

    def _is_current(self, worker: WorkerProcess) -> bool:
        return self._workers.get(worker.number) is worker

    def _replace(self, worker: WorkerProcess, reason: str) -> None:
        """Kill a worker, start another in its place, and put its requests back in front."""
        lost = f"{worker} was lost while {worker.state}: {reason}"
        last_words = worker.host.last_words()
        back = self._remove(worker)
        self._lost[worker.number] += 1
        if not self.restarts.spend():
            raise errors.no_restart_left(self.restarts.limit, lost, last_words)
        words = [line for line in last_words.splitlines() if line.strip() not in lost]
        self._report(
            f"{lost}; restart {self.restarts.used} of {self.restarts.limit}, "
            f"{back} of its requests are served again"
            + "\n".join(["; last words:", *words] if words else [])
        )
        self._spawn(worker.number)

    def _poll(self) -> None:
        """Wait for an event, handle it, and dispatch requests."""
        for worker in [one for one in self._workers.values() if one.connection is None]:
            self._connect(worker)
        for key, events in self._selector.select(WAIT_S):
            if (worker := key.data) is None:
                self._waker.clear()
                continue
            if events & selectors.EVENT_READ and self._is_current(worker):
                self._on_readable(worker)
            if events & selectors.EVENT_WRITE and self._is_current(worker):
                self._flush(worker)
        self._check_heartbeats()
        self._dispatch()

    def _check_heartbeats(self) -> None:
        """Replace silent workers. Time in which the pool did not listen counts little."""
        now = time.monotonic()
        passed, self._polled = min(now - self._polled, self._beat_s), now
        for worker in self.workers:
            worker.silent_s += passed
            if worker.silent_s > self._heartbeat_s:
                stack = worker.host.stack() or "it has no stack: it was stopped, or had not begun"
                self._replace(worker, f"no sign of life for {self._heartbeat_s:g} s\n{stack}")

    # ---------------------------------------------------------------- from a worker

    def _on_readable(self, worker: WorkerProcess) -> None:
        worker.silent_s = 0.0
        try:
            for message in worker.channel.receive():
                self._on_message(worker, message)
                if not self._is_current(worker):  # its channel is closed
                    return
        except ProtocolError as error:
            self._replace(worker, f"it wrote what is {error}")
        except EOFError:
            self._replace(worker, worker.host.how_it_ended())

    def _on_message(self, worker: WorkerProcess, message: Message) -> None:
        if message != {"alive": False}:  # it is at work
            self.on_life()
        match message:
            case {"alive": bool()}:
                pass
            case {"ready": True} if not worker.started:
                worker.started = True
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
                    raise errors.other_weights(where, names, digest, expected)
                worker.version = version
                self._weights.loaded(version, time.monotonic() - worker.offered_at)
            case {"failed": str(reason)} if worker.retried != version:
                self._report(f"{worker} did not get weights {version}, and tries again: {reason}")
                worker.retried = version
                self._sync(version, [worker])
            case _:
                reason = message.get("failed", str(message)[:200])
                self._replace(worker, f"it did not get weights {version}: {reason}")

    def _on_completion(
        self, worker: WorkerProcess, ticket: Ticket, identity: str, message: Message
    ) -> None:
        completion = read_completion(message)
        where = f"{worker}, request {ticket.number}"
        errors.check_completion(where, ticket, identity, completion)
        del worker.tickets[ticket.number]
        worker.num_completed += 1
        if ticket.completion is None:  # else it was cancelled meanwhile
            ticket.completion = completion
            self._ended.append(ticket)
