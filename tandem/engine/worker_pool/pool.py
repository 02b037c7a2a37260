"""Rollout workers: requests go to engines in processes of their own. Implements types.Generate.

    caller's thread                                                        worker process 0 .. count - 1 (worker.py)
    ---------------                                                        ---------------------------------------
    submit(request)  -> todo                                               one thread, one engine, a copy of the weights
    step()  _hand_out   todo -> tickets of a worker, {"request": 7}  --->  Engine.submit, Engine.step
            _listen     completion of ticket 7; signs of life        <---  {"completion": 7}, {"alive": true}
            _look       silence: SIGKILL, a new one, its tickets back to the front of todo
    apply(version)      descriptor of the weights to all that are up --->  map, load, hash
            _take_hash  it must be the trainer's                     <---  {"applied": 4, "hash": "9f86..."}

step waits for the workers' sockets, at most WAIT_S, as its caller may have more to submit; apply
waits until each worker that is up has answered or is lost; nothing else waits. What unblocks both:
an answer, the end of a socket, or heartbeat_s without a sign of life, after which the worker is
killed. Silence counts while somebody listens, so a driver that was stopped or busy takes nobody for
silent.

A worker is starting, then syncing (it loads the current version), and is given requests only when
its hash was right. While one starts, the others serve. A request that was with a lost worker goes
to another as it was, with the address of its draws, so what comes back has the same bits; what
depends on chance is only who makes it. One thread at a time calls this; `close` and `status` any
thread (the trainer's writes into weights/shared.py only). On Linux a worker ends with the thread
that started it: the one that made Workers or, for one that was replaced, the one that called
`step`.
"""

import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tandem.engine.worker_pool.process import Handed, Lost, Process, State
from tandem.engine.worker_pool.protocol import (
    Garbage,
    Message,
    identity_of,
    read_completion,
    read_error,
    request_message,
)
from tandem.runtime import watchdog
from tandem.runtime.errors import InvariantError, UserError
from tandem.types import Completion, Request

if TYPE_CHECKING:  # nothing here needs torch
    from tandem.weights.mapped import Layout

COMMAND = (sys.executable, "-m", "tandem.engine.worker_pool.worker")
WAIT_S = 0.05  # in one step
BEATS = 4  # signs of life at least in heartbeat_s


class Published(Protocol):
    """Where the weights are: weights/shared.py."""

    layout: "Layout"

    def descriptor(self, version: int) -> int:
        """For model.mapped.read_tensors; whoever asks closes it."""
        ...

    def hash_of(self, version: int) -> str:
        """model.hashing.weight_hash of them, as the trainer had them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A worker at a moment. Example: Status(number=0, pid=4711, state="serving", requests=12)"""

    number: int
    pid: int
    state: State
    requests: int


class Workers:
    """Starts the workers; weights reach them with the first `apply`. Use it as a context, or close
    it.

    longest: most tokens of one sequence that an engine with cache_mb places, as Engine.longest has
    it. cache_mb and max_batch are for each worker. restarts: how many workers may be lost,
    together; the next one ends the run with a UserError. report is told of every loss.
    """

    def __init__(
        self,
        *,
        model_path: str,
        cache_mb: int,
        max_batch: int,
        longest: int,
        count: int,
        heartbeat_s: float,
        restarts: int,
        weights: Published,
        report: Callable[[str], None],
        command: Sequence[str] = COMMAND,
    ):
        self.weight_version = -1  # none yet
        self.longest = longest
        self.restarted = self.handed_over = 0  # workers, and requests that were with them
        self._max_batch, self._restarts, self._heartbeat_s = max_batch, restarts, heartbeat_s
        self._weights, self._report, self._command = weights, report, command
        self._beat_s = min(1.0, heartbeat_s / BEATS)
        self._start = {
            "model_path": model_path,
            "cache_bytes": cache_mb << 20,
            "max_batch": max_batch,
            "layout": weights.layout.parts,
            "beat_s": self._beat_s,
        }
        self._todo: deque[Handed] = deque()
        self._ended: list[Handed] = []
        self._submitted = 0
        self._homes: dict[
            int, Process
        ] = {}  # who has a beginning in its cache: by an episode's key, by a prompt's hash
        self._gaps: dict[int, float | None] = {}  # by worker, None while it is asked
        self._listened = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, Process] = {}
        self._closing, self._closed = threading.Lock(), False
        for number in range(count):
            self._new(number)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """End every worker now; nothing that they have is needed. Any thread may; who is in `step`
        then gets an error."""
        with self._closing:
            self._closed = True
            while self._workers:
                self._workers.popitem()[1].end()
            self._selector.close()

    def status(self) -> list[Status]:
        """Any thread may ask."""
        workers = sorted(self._workers.values(), key=lambda worker: worker.number)
        return [
            Status(number=w.number, pid=w.pid, state=w.state, requests=len(w.tickets))
            for w in workers
        ]

    # ---- Generate

    def submit(self, request: Request) -> Handed:
        """Take a request. Raises UserError when no engine has room for it."""
        needed = len(request.prompt) + request.params.max_new_tokens
        if needed > self.longest:
            raise UserError(
                "a sequence would be longer than an engine can hold",
                where="rollout.max_new_tokens",
                found=f"{needed} tokens, prompt and completion",
                expected=f"at most {self.longest} (by the model's positions and rollout.cache_mb)",
            )
        ticket = Handed(self._submitted, request, identity_of(request))
        self._submitted += 1
        self._todo.append(ticket)
        return ticket

    def step(self) -> list[Handed]:
        """Wait a moment for something to end; returns those that have."""
        if self._closed:
            raise RuntimeError("the rollout workers are closed")
        self._hand_out()
        if not self._ended:
            self._listen()
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, ticket: Handed) -> None:
        """End a request now, with nothing; one that has ended stays as it is."""
        if ticket.completion is not None:
            return
        ticket.completion = _nothing()
        with suppress(ValueError):  # it is with a worker
            self._todo.remove(ticket)
        for worker in self._workers.values():
            if ticket.number in worker.tickets:
                self._tell(worker, {"cancel": ticket.number})

    def apply(self, version: int) -> None:
        """The weights of that version, which are published, are what runs from now on. Nothing may
        be under way.

        Raises UserError when a worker's weights are not the trainer's.
        """
        given = [ticket for worker in self._workers.values() for ticket in worker.tickets.values()]
        if self._todo or any(ticket.completion is None for ticket in given):
            raise RuntimeError(f"weights of version {version} come while requests are under way")
        self.weight_version = version
        self._homes.clear()
        up = [worker for worker in self._workers.values() if worker.started]
        for worker in up:
            self._sync(worker)
        with watchdog.waits(of="rollout workers", what=f"the hash of weights {version}"):
            while any(self._is_there(worker) and worker.state == "syncing" for worker in up):
                self._listen()

    def logprob_gap(self) -> float:
        """The largest Engine.logprob_gap of the workers that are up, each of a completion of its
        own; of one that is lost meanwhile nothing is known."""
        asked = [
            worker for worker in self._workers.values() if worker.version == self.weight_version
        ]
        self._gaps = dict.fromkeys((worker.number for worker in asked), None)
        for worker in asked:
            self._tell(worker, {"check": self.weight_version})
        with watchdog.waits(of="rollout workers", what="the log-probs of a completion of theirs"):
            while any(
                self._is_there(worker) and self._gaps[worker.number] is None for worker in asked
            ):
                self._listen()
        # a NaN shows
        return float(np.max([gap for gap in self._gaps.values() if gap is not None], initial=0.0))

    # ---- who gets what

    def _hand_out(self) -> None:
        """Give what is to be done to the workers that may have it, evenly, and no more than runs at
        once.

        A share counts the workers that start, too: the first one that is up does not take it all.
        What begins alike goes to one worker as long as that is even.
        """
        ready = [worker for worker in self._workers.values() if worker.state in ("idle", "serving")]
        if not ready or not self._todo:
            return
        load = len(self._todo) + sum(len(worker.tickets) for worker in self._workers.values())
        share = min(-(-load // len(self._workers)), self._max_batch)
        while self._todo and (free := [worker for worker in ready if len(worker.tickets) < share]):
            ticket = self._todo.popleft()
            request = ticket.request
            names = request.key, hash(request.prompt.tobytes())
            homes = [self._homes[name] for name in names if self._homes.get(name) in free]
            worker = homes[0] if homes else min(free, key=lambda worker: len(worker.tickets))
            for name in names:
                self._homes[name] = worker
            worker.tickets[ticket.number] = ticket
            self._tell(worker, request_message(ticket.number, request))

    # ---- processes

    def _new(self, number: int) -> None:
        with self._closing:
            if self._closed:
                raise RuntimeError("the rollout workers are closed")
            worker = self._workers[number] = Process(number, self._command)
            self._selector.register(worker.socket, selectors.EVENT_READ, worker)
        self._tell(worker, {"start": self._start})

    def _is_there(self, worker: Process) -> bool:
        return self._workers.get(worker.number) is worker

    def _sync(self, worker: Process) -> None:
        worker.asked.append(self.weight_version)
        self._tell(
            worker, {"apply": self.weight_version}, self._weights.descriptor(self.weight_version)
        )

    def _tell(self, worker: Process, message: Message, descriptor: int = -1) -> None:
        worker.send(message, descriptor)
        self._wait_for(worker)

    def _wait_for(self, worker: Process) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.flush() else 0)
        self._selector.modify(worker.socket, events, worker)

    def _lose(self, worker: Process, why: str) -> None:
        """Kill it, start another in its place, and put what it had back in front."""
        state, words = worker.state, worker.last_words()
        self._selector.unregister(self._workers.pop(worker.number).socket)
        worker.end()
        back = [ticket for ticket in worker.tickets.values() if ticket.completion is None]
        self._todo.extendleft(reversed(back))
        self._homes = {name: home for name, home in self._homes.items() if home is not worker}
        told = (
            f"rollout worker {worker.number} (process {worker.pid}) was lost while {state}: {why}"
        )
        if self.restarted >= self._restarts:
            raise UserError(
                "rollout workers end again and again",
                where=told,
                found=words,
                expected=f"at most {self._restarts} restarts in a run (rollout.restarts)",
                next="look at what the worker wrote last; the same command resumes the run",
            )
        self.restarted += 1
        self.handed_over += len(back)
        self._report(
            f"{told}; restart {self.restarted} of {self._restarts}, {len(back)} of its requests are served again"
        )
        self._new(worker.number)

    # ---- what they say

    def _listen(self) -> None:
        """Wait for something to happen, handle it, and hand out what that makes possible."""
        for key, events in self._selector.select(WAIT_S):
            worker: Process = key.data
            if events & selectors.EVENT_READ and self._is_there(worker):
                self._hear(worker)
            if events & selectors.EVENT_WRITE and self._is_there(worker):
                self._wait_for(worker)
        self._look()
        self._hand_out()

    def _look(self) -> None:
        """Find who is silent. Time that nobody listened counts little: what was said meanwhile
        waits in the socket."""
        now = time.monotonic()
        passed, self._listened = min(now - self._listened, self._beat_s), now
        for worker in list(self._workers.values()):
            worker.silent_s += passed
            if worker.silent_s > self._heartbeat_s:
                where = (
                    worker.stack() or "it cannot say where it is: it was stopped, or had not begun"
                )
                self._lose(worker, f"no sign of life for {self._heartbeat_s:g} s\n{where}")

    def _hear(self, worker: Process) -> None:
        try:
            for message in worker.receive():
                self._take(worker, message)
        except Lost as lost:
            self._lose(worker, str(lost))

    def _take(self, worker: Process, message: Message) -> None:
        if message != {"alive": False}:  # it is at something
            watchdog.beat()
        match message:
            case {"alive": bool()}:
                pass
            case {"ready": True} if not worker.started:
                worker.started = True
                if self.weight_version >= 0:
                    self._sync(worker)
            case {"applied": int(version), "hash": str(digest)} if (
                worker.asked and version == worker.asked[0]
            ):
                self._take_hash(worker, worker.asked.popleft(), digest)
            case {"completion": int(number), "identity": str(identity)} if number in worker.tickets:
                self._take_completion(worker, worker.tickets[number], identity, message)
            case {"cancelled": int(number)} if (
                number in worker.tickets and worker.tickets[number].completion
            ):
                del worker.tickets[number]
            case {"checked": int(version), "gap": float(gap)} if version == self.weight_version:
                self._gaps[worker.number] = gap
            case {"error": {"what": _}}:
                raise read_error(message)
            case _:
                raise Lost(f"it wrote what is not an answer: {str(message)[:200]}")

    def _take_hash(self, worker: Process, version: int, digest: str) -> None:
        # another one was applied meanwhile, and it has been told
        if version != self.weight_version:
            return
        expected = self._weights.hash_of(version)
        if digest != expected:
            raise UserError(
                "the engine's weights differ from the trainer's",
                where=f"rollout worker {worker.number} (process {worker.pid}), weight version {version}",
                found=digest,
                expected=expected,
                next="no token was sampled with them; the same command resumes the run",
            )
        worker.version = version

    def _take_completion(
        self, worker: Process, ticket: Handed, identity: str, message: Message
    ) -> None:
        where = f"rollout worker {worker.number} (process {worker.pid}), request {ticket.number}"
        if identity != ticket.identity:
            raise InvariantError(
                "a completion was made for another request",
                where=where,
                found=identity,
                expected=ticket.identity,
                next="a bug: it is not trained; please report it",
            )
        try:
            completion = read_completion(message)
        except Garbage as error:
            raise Lost(str(error)) from None
        begun = 0 if ticket.request.begun is None else len(ticket.request.begun.tokens)
        versions = completion.weight_versions[begun:]
        if (versions != self.weight_version).any():
            raise UserError(
                "a completion was sampled by other weights than those applied",
                where=where,
                found=f"tokens of version {sorted(set(versions.tolist()))}",
                expected=f"version {self.weight_version}",
            )
        del worker.tickets[ticket.number]
        if ticket.completion is None:  # else it was cancelled meanwhile
            ticket.completion = completion
            self._ended.append(ticket)


def _nothing() -> Completion:
    return Completion(
        tokens=np.zeros(0, np.int64),
        logprobs=np.zeros(0, np.float32),
        weight_versions=np.zeros(0, np.int32),
        text="",
        stop_reason="cancelled",
    )
