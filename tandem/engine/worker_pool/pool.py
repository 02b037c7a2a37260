"""Rollout workers: requests go to engines in processes of their own. Implements types.Generate.

    caller's thread                                        worker process 0 .. count - 1 (worker.py)
    ---------------                                        ---------------------------------------
    submit(request)  -> todo                               one thread, one engine, own weights
    step()  _dispatch      todo -> tickets of a worker --> {"request": 7}: submit, Engine.step
            _on_message    completion, signs of life  <--  {"completion": 7}, {"alive": true}
            _check_heartbeats  silence: SIGKILL, a new worker, its tickets back in front
    apply(version)         weights to all that are up -->  receive, load, hash
            _on_applied    it must be the trainer's   <--  {"applied": 4, "hash": "9f86..."}
              or once more, then a new worker         <--  {"applied": 4, "failed": "..."}

step waits for the workers' sockets, at most WAIT_S, as its caller may have more to submit; apply
waits until the first worker runs the weights, or none that is up is left; nothing else waits. Both
go on after an answer, the end of a socket, or heartbeat_s without a sign of life, after which the
worker is killed. Silence counts only while the pool listens, and not while the driver is busy.

A worker is starting, then syncing (it loads the current version), and gets requests only after its
hash was right. While one starts, the others serve. A request of a lost worker goes to another
unchanged, with the address of its draws, so the completion has the same bits; chance decides only
which worker makes it. One thread at a time calls this; `close` may come from any thread. On Linux a
worker ends with the thread that started it: the one that made Workers or, for a replacement, the
one that called `step`.
"""

import selectors
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from tandem.engine.worker_pool import errors
from tandem.engine.worker_pool.process import LocalProcess, Published, Spawn, Ticket, WorkerProcess
from tandem.engine.worker_pool.protocol import (
    cancelled_completion,
    identity_of,
    read_completion,
    read_error,
    request_message,
)
from tandem.runtime import watchdog
from tandem.runtime.worker_channel import Message, ProtocolError, RestartLimit
from tandem.types import Request

COMMAND = (sys.executable, "-m", "tandem.engine.worker_pool.worker")
WAIT_S = 0.05  # in one step
BEATS = 4  # signs of life at least in heartbeat_s


class Workers:
    """Pool of rollout workers, a context; weights reach them with the first `apply`.

    longest: most tokens of one sequence that an engine with cache_mb places, as Engine.longest.
    Worker n is on devices[n % len(devices)]; cache_mb, max_batch, splits: of each. restarts: most
    workers that may be lost; the next one ends the run with a UserError. report: told of losses.
    spawn: starts a worker's process; None: `command`, on this machine.
    """

    def __init__(
        self,
        *,
        model_path: str,
        devices: Sequence[str] = ("cpu",),
        dtype: str = "float32",
        splits: int = 1,
        cache_mb: int,
        max_batch: int,
        longest: int,
        count: int,
        heartbeat_s: float,
        restarts: int,
        weights: Published,
        record_experts: bool = False,
        report: Callable[[str], None],
        command: Sequence[str] = COMMAND,
        spawn: Spawn | None = None,
    ):
        self.weight_version = -1  # none yet
        self.longest, self.restarts = longest, RestartLimit(restarts)
        self._max_batch, self._heartbeat_s = max_batch, heartbeat_s
        self._weights, self._report = weights, report
        self._host = spawn or (lambda number: LocalProcess(command))
        self._beat_s, self._devices = min(1.0, heartbeat_s / BEATS), devices
        self._start = {
            "model_path": model_path,
            "dtype": dtype,
            "splits": splits,
            "cache_bytes": cache_mb << 20,
            "max_batch": max_batch,
            "longest": longest,
            "layout": weights.layout.parts,
            "record_experts": record_experts,
            "beat_s": self._beat_s,
        }
        self._todo: deque[Ticket] = deque()
        self._submitted, self._ended = 0, list[Ticket]()
        # the worker with a prefix in its cache, by an episode's key and by a prompt's hash
        self._affinity: dict[int, WorkerProcess] = {}
        self._gaps: dict[int, float | None] = {}  # by worker, None while it checks
        self._polled = time.monotonic()
        self._selector = selectors.DefaultSelector()
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
        with self._closing:
            self._closed = True
            while self._workers:
                self._workers.popitem()[1].host.end()
            self._selector.close()

    # ---------------------------------------------------------------- Generate

    def submit(self, request: Request) -> Ticket:
        """Take a request. Raises UserError if no engine has room for it."""
        needed = len(request.prompt) + request.params.max_new_tokens
        if needed > self.longest:
            raise errors.too_long(needed, self.longest)
        ticket = Ticket(self._submitted, request, identity_of(request))
        self._submitted += 1
        self._todo.append(ticket)
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
            self._todo.remove(ticket)
        for worker in self._workers.values():
            if ticket.number in worker.tickets:
                self._send(worker, {"cancel": ticket.number})

    def apply(self, version: int) -> None:
        """Run the published weights of that version from now on. No request may be under way.

        Returns once one worker serves. Raises UserError, as `step` does, for other weights.
        """
        self._require_idle(f"weights of version {version} come")
        self.weight_version = version
        self._affinity.clear()
        up = [worker for worker in self._workers.values() if worker.started]
        self._sync(up)
        with watchdog.waiting_for("rollout workers", f"the hash of weights {version}"):
            while (left := [worker for worker in up if self._is_current(worker)]) and all(
                worker.state == "syncing" for worker in left
            ):
                self._poll()

    def resize(self, count: int) -> None:
        """Start or end workers until there are count. No request may be under way."""
        self._require_idle("workers join or leave")
        for number in sorted(self._workers)[count:]:
            self._remove(self._workers[number])
        for number in range(len(self._workers), count):
            self._spawn(number)

    def _require_idle(self, what: str) -> None:
        given = [ticket for one in self._workers.values() for ticket in one.tickets.values()]
        if self._todo or any(ticket.completion is None for ticket in given):
            raise RuntimeError(f"{what} while requests are under way")

    @property
    def count(self) -> int:
        return len(self._workers)

    def status(self) -> list[dict[str, Any]]:
        """Describe each worker: where it runs and what it does. Any thread may ask."""
        return [
            {**worker.describe(), "restarts": self._lost[number]}
            for number, worker in sorted(self._workers.copy().items())
        ]

    def logprob_gap(self) -> float:
        """Return the largest Engine.logprob_gap of the workers that are up and stay so."""
        up = [worker for worker in self._workers.values() if worker.version == self.weight_version]
        self._gaps = dict.fromkeys((worker.number for worker in up), None)
        for worker in up:
            self._send(worker, {"check": self.weight_version})
        with watchdog.waiting_for("rollout workers", "their log-probs"):
            while any(self._is_current(one) and self._gaps[one.number] is None for one in up):
                self._poll()
        # a NaN shows
        return float(np.max([gap for gap in self._gaps.values() if gap is not None], initial=0.0))

    # ---------------------------------------------------------------- to a worker

    def _dispatch(self) -> None:
        """Give requests to the workers that serve, evenly, and no more than they run at once.

        A share counts the workers that still start, so that the first one up does not take all.
        Requests with the same prefix go to one worker as long as that is even.
        """
        ready = [worker for worker in self._workers.values() if worker.state in ("idle", "serving")]
        if not ready or not self._todo:
            return
        load = len(self._todo) + sum(len(worker.tickets) for worker in self._workers.values())
        share = min(-(-load // len(self._workers)), self._max_batch)
        while self._todo and (free := [worker for worker in ready if len(worker.tickets) < share]):
            ticket = self._todo.popleft()
            request = ticket.request
            keys = request.key, hash(request.prompt.tobytes())
            cached = [self._affinity[key] for key in keys if self._affinity.get(key) in free]
            worker = cached[0] if cached else min(free, key=lambda worker: len(worker.tickets))
            self._affinity |= dict.fromkeys(keys, worker)
            worker.tickets[ticket.number] = ticket
            self._send(worker, request_message(ticket.number, request))

    def _sync(self, workers: Sequence[WorkerProcess]) -> None:
        """Offer the weights to workers; what they run is unknown until the hash is right."""
        version = self.weight_version
        offers = self._weights.offer(version, workers)
        for worker, (source, descriptor) in zip(workers, offers, strict=True):
            worker.syncing.append(version)
            worker.version = -1
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
        device = self._devices[worker.number % len(self._devices)]
        self._send(worker, {"start": {**self._start, "device": device}})

    def _remove(self, worker: WorkerProcess) -> None:
        """End a worker, and forget it."""
        del self._workers[worker.number]
        if worker.connection is not None:
            self._selector.unregister(worker.connection.socket)
        worker.host.end()
        self._affinity = {key: home for key, home in self._affinity.items() if home is not worker}

    def _is_current(self, worker: WorkerProcess) -> bool:
        return self._workers.get(worker.number) is worker

    def _replace(self, worker: WorkerProcess, reason: str) -> None:
        """Kill a worker, start another in its place, and put its requests back in front."""
        lost = f"{worker} was lost while {worker.state}: {reason}"
        last_words = worker.host.last_words()
        self._remove(worker)
        self._lost[worker.number] += 1
        back = [ticket for ticket in worker.tickets.values() if ticket.completion is None]
        self._todo.extendleft(reversed(back))
        if not self.restarts.spend():
            raise errors.no_restart_left(self.restarts.limit, lost, last_words)
        self._report(
            f"{lost}; restart {self.restarts.used} of {self.restarts.limit}, "
            f"{len(back)} of its requests are served again"
        )
        self._spawn(worker.number)

    def _poll(self) -> None:
        """Wait for an event, handle it, and dispatch requests."""
        for worker in [one for one in self._workers.values() if one.connection is None]:
            self._connect(worker)
        for key, events in self._selector.select(WAIT_S):
            worker = key.data
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
        for worker in list(self._workers.values()):
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
            watchdog.heartbeat()
        match message:
            case {"alive": bool()}:
                pass
            case {"ready": True} if not worker.started:
                worker.started = True
                if self.weight_version >= 0:
                    self._sync([worker])
            case {"applied": int(version)} if worker.syncing and version == worker.syncing[0]:
                worker.syncing.popleft()
                if version == self.weight_version:  # else a newer one was sent meanwhile
                    self._on_applied(worker, message)
            case {"completion": int(number), "identity": str(identity)} if number in worker.tickets:
                self._on_completion(worker, worker.tickets[number], identity, message)
            case {"cancelled": int(number)} if (
                number in worker.tickets and worker.tickets[number].completion
            ):
                del worker.tickets[number]
            case {"checked": int(version), "gap": float(gap)} if version == self.weight_version:
                self._gaps[worker.number] = gap
            case {"error": {"what": _}}:
                raise read_error(message)
            case _:
                raise ProtocolError(f"not an answer: {str(message)[:200]}")

    def _on_applied(self, worker: WorkerProcess, message: Message) -> None:
        version, expected = self.weight_version, self._weights.hash_of(self.weight_version)
        match message:
            case {"hash": str(digest), "differ": list(names)}:
                if digest != expected:
                    where = f"{worker}, weight version {version}"
                    raise errors.other_weights(where, names, digest, expected)
                worker.version = version
            case {"failed": str(reason)} if worker.retried != version:
                self._report(f"{worker} did not get weights {version}, and tries again: {reason}")
                worker.retried = version
                self._sync([worker])
            case _:
                reason = message.get("failed", str(message)[:200])
                self._replace(worker, f"it did not get weights {version}: {reason}")

    def _on_completion(
        self, worker: WorkerProcess, ticket: Ticket, identity: str, message: Message
    ) -> None:
        where = f"{worker}, request {ticket.number}"
        if identity != ticket.identity:
            raise errors.other_request(where, identity, ticket.identity)
        completion = read_completion(message)
        paused = ticket.request.resume_from
        versions = completion.weight_versions[0 if paused is None else len(paused.tokens) :]
        if (versions != self.weight_version).any():
            raise errors.other_version(where, sorted(set(versions.tolist())), self.weight_version)
        del worker.tickets[ticket.number]
        worker.num_completed += 1
        if ticket.completion is None:  # else it was cancelled meanwhile
            ticket.completion = completion
            self._ended.append(ticket)
