"""A pool of workers that answer calls: a thread, workers that join as calls wait, and a future a
call.

    any thread             this thread                               a worker (serve.py)
    ----------             -----------                               -------------------
    submit -> todo, wake   _dispatch  at most `depth` calls each -->  serves them
                           _grow      up to `most` workers
    future <- _on_answer   _listen                               <--  {"id": 7, ...}
                           _check_deadlines  SIGKILL when a call is late
                           _lose      its calls go to others

Waits for: wake, the workers' sockets and the nearest deadline; where workers give signs of life, or
answers are due, at most LOOK_S. Calls of a lost worker are served again; one with which
`Limits.losses` workers were lost fails, and the last time it is alone with its worker, so that no
other call is lost with it. Workers that are lost before their first answer, one after the other and
more than `most`, end the pool. However it ends, no future is left waiting.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tandem.runtime import watchdog
from tandem.runtime.errors import UserError
from tandem.workers.channel import Message, ProtocolError, read_error
from tandem.workers.host import Host, OpenHost
from tandem.workers.pool import Limits, Pool, RestartLimit, Worker

LOOK_S, CONNECTING_S = 0.5, 0.05  # between looks; while a worker has not connected
Q = TypeVar("Q")  # what is asked


@dataclass(slots=True, eq=False)
class Call(Generic[Q]):
    """A call on its way. losses: workers that were lost with it."""

    index: int
    asked: Q
    deadline_s: float  # from the moment that a worker has it
    future: Future[Any] = field(default_factory=Future)
    ends: float = math.inf  # clock seconds
    losses: int = 0


class CallWorker(Worker):
    """A worker, and the calls that it was given."""

    def __init__(self, role: str, number: int, host: Host, now: float):
        super().__init__(role, number, host)
        self.began = now
        self.calls: dict[int, Call[Any]] = {}
        self.held: set[Any] = set()  # what it keeps between calls

    @property
    def state(self) -> str:
        return "serving" if self.calls else super().state


V = TypeVar("V", bound=CallWorker)


class CallPool(Pool[V], Generic[V, Q]):
    """The pool, a context; a subclass says what its calls are, and `run`s it.

    depth: calls that a worker is given at once. most: workers at most. Others are those of Pool.
    """

    def __init__(
        self,
        open_host: OpenHost,
        limits: Limits,
        *,
        depth: int,
        most: int,
        report: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(open_host, limits, report, clock)
        self.started: Future[None] = Future()  # set when the first worker is ready
        self._depth, self.most = depth, most
        self._todo: deque[Call[Q]] = deque()  # no worker has them
        self._numbers = itertools.count()
        self._restarts = RestartLimit(limits.restarts + most - 1)  # a node may have all of them

    def submit_call(
        self, asked: Q, deadline_s: float = math.inf, *, first: bool = False
    ) -> Future[Any]:
        """Have a worker serve a call; any thread may. first: before those that wait. Raises
        RuntimeError if the pool has ended, or soon will, or the UserError that has ended it."""
        call = Call(next(self._numbers), asked, deadline_s)
        call.future.set_running_or_notify_cancel()  # not to be cancelled: a worker may have it
        with self._ending:
            self.require_open()
            (self._todo.appendleft if first else self._todo.append)(call)
            self.wake()
        return call.future

    # ---------------------------------------------------------------- what the calls are

    def _encode(self, worker: V, call: Call[Q]) -> bytes:
        """Return the line of a call to a worker. Raises TypeError, ValueError or RecursionError."""
        raise NotImplementedError

    def _result(self, message: Message) -> Any:
        """Return the result in an answer. Raises ProtocolError if it is malformed."""
        raise NotImplementedError

    def _fail(self, worker: V | None, call: Call[Q], kind: str, error: str) -> None:
        """Settle a call that was not served. worker: that had it. kind: timeout, died,
        exception."""
        raise NotImplementedError

    def _is_over(self, call: Call[Q]) -> bool:
        """Settle a call that needs no worker any more, and return whether it is one."""
        return False

    def _cannot_go_on(self, worker: V, lost: str) -> UserError:
        """Make the error for workers that cannot be started. lost: the last one, and how."""
        raise NotImplementedError

    # ---------------------------------------------------------------- the thread

    def step(self) -> None:
        self._dispatch()
        self._grow()  # by what could not be given out
        due = len(self._todo) + sum(len(worker.calls) for worker in self.workers)
        whom, what = (f"{self.role}s", f"{due} answers") if due else ("trainer", "calls")
        with watchdog.waiting_for(whom, what):
            self._listen(self._look_s(due))
        self._check_deadlines()

    def _give_up(self, error: BaseException) -> None:
        given = [call for worker in self.workers for call in worker.calls.values()]
        for call in (*given, *self._todo):
            call.future.set_exception(error)
        if not self.started.done():
            self.started.set_exception(error)

    def _look_s(self, due: int) -> float | None:
        """Return how long to wait at most. due: answers."""
        if any(worker.connection is None for worker in self.workers):
            return CONNECTING_S
        nearest = min((self._deadline(worker) for worker in self.workers), default=math.inf)
        if not due and nearest == self.limits.silent_s == math.inf:
            return None
        return min(max(0.0, nearest - self._clock()), LOOK_S, self.limits.beat_s)

    def _deadline(self, worker: V) -> float:
        if not worker.ready:
            return worker.began + self.limits.start_s
        return min((call.ends for call in worker.calls.values()), default=math.inf)

    def _check_deadlines(self) -> None:
        """Kill workers that are out of time; their earlier lines count."""
        now = self._clock()
        for worker in self.workers:
            if now >= self._deadline(worker) and worker.connection is not None:
                self._read(worker)
            if now < self._deadline(worker) or not self._is_current(worker):
                continue
            if not worker.ready:
                raise self._cannot_go_on(worker, f"timeout after {self.limits.start_s} s")
            self._end(worker)
            self._restarts.reset()
            for call in reversed(worker.calls.values()):
                if now >= call.ends:
                    self._fail(worker, call, "timeout", f"timeout after {call.deadline_s} s")
                else:
                    self._todo.appendleft(call)

    # ---------------------------------------------------------------- workers

    def _grow(self) -> None:
        """Have a worker join when calls wait, and one from the start."""
        workers, first = self._workers.values(), self.started.done()
        if workers:
            joins = self._todo and all(one.ready for one in workers) and len(workers) < self.most
        else:
            joins = self._todo or self._restarts.used < self._restarts.limit or not first
        if joins:
            self._begin(next(n for n in itertools.count() if n not in self._workers))

    def _lose(self, worker: V, reason: str) -> None:
        """Kill a worker, and put its calls back in front."""
        lost = f"{worker} was lost while {worker.state}: {reason}"
        if worker.num_done == 0 and not self._restarts.spend():
            raise self._cannot_go_on(worker, lost)
        self._end(worker)
        for call in reversed(worker.calls.values()):
            call.losses += 1
            if call.losses < self.limits.losses:
                self._todo.appendleft(call)
            else:
                self._restarts.reset()
                self._fail(worker, call, "died", f"worker died: {reason}")
        self._report(f"{lost}; its {len(worker.calls)} calls are served again")

    # ---------------------------------------------------------------- to and from a worker

    def _dispatch(self) -> None:
        """Give calls to the ready workers that have room."""
        while self._todo:
            call = self._todo.popleft()
            if self._is_over(call):
                continue
            if (worker := self._choose(call)) is None:
                self._todo.appendleft(call)
                return
            self._give(worker, call)

    def _choose(self, call: Call[Q]) -> V | None:
        """Choose the ready worker with the fewest calls, if any has room."""
        tries = self.limits.losses - 1  # after which a call may be what its workers die of
        depth = self._depth if call.losses < tries else 1
        room = [
            worker
            for worker in self._workers.values()
            if worker.ready
            and len(worker.calls) < depth
            and all(one.losses < tries for one in worker.calls.values())
        ]
        return min(room, key=lambda one: (len(one.held), len(one.calls)), default=None)

    def _give(self, worker: V, call: Call[Q]) -> None:
        try:
            line = self._encode(worker, call)
        except (TypeError, ValueError, RecursionError) as error:
            self._fail(None, call, "exception", f"the problem cannot be sent as JSON: {error}")
            return
        worker.calls[call.index] = call
        call.ends = self._clock() + call.deadline_s
        worker.channel.send_line(line)
        self._flush(worker)

    def _on_message(self, worker: V, message: Message) -> None:
        match message:
            case {"alive": True}:
                pass
            case {"ready": True}:
                worker.ready = True
                if not self.started.done():
                    self.started.set_result(None)
            case {"error": {"what": _}}:
                raise self._refusal(worker, read_error(message))
            case {"id": int(number)} if number in worker.calls:
                self._on_answer(worker, worker.calls[number], message)
            case _:
                raise ProtocolError(f"not an answer: {str(message)[:200]}")

    def _refusal(self, worker: V, error: UserError) -> UserError:
        """Return what a worker's UserError is to its user."""
        return error

    def _on_answer(self, worker: V, call: Call[Q], message: Message) -> None:
        result = self._result(message)
        del worker.calls[call.index]
        worker.num_done += 1
        self._restarts.reset()
        call.future.set_result(result)
