"""The thread of workers on the nodes of a cluster that serve calls, and that join and leave by
themselves. Knows neither Ray nor the calls (reward_actors.py, env_actors.py).

    any thread             this thread                               a node (call_worker.py)
    ----------             -----------                               -----------------------
    add -> todo, wake      _dispatch  at most `depth` calls each -->  serves several at once
                           _scale     between 1 and `most` workers
    future <- _on_message  _on_readable                          <--  {"id": 7, ...}
                           _check_silence   its calls go to others

Waits for: wake and the workers' sockets, at most LOOK_S. Deadlines of calls are the matter of the
node. Calls of a lost worker are served again, one that was lost with LOSSES workers has an error;
the last time it is alone with its worker, so that no other call is lost with it. Workers that are
lost before their first answer, one after the other and more than a node's, end the pool.
"""

import itertools
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tandem.engine.worker_pool.pool import BEATS
from tandem.engine.worker_pool.process import Host, Spawn
from tandem.engine.worker_pool.protocol import read_error
from tandem.plugins.cluster.errors import workers_lost
from tandem.rewards.pool.task_thread import T, Task, TaskThread
from tandem.runtime import watchdog
from tandem.runtime.worker_channel import Channel, Message, ProtocolError, RestartLimit

LOOK_S, CONNECTING_S = 0.5, 0.05  # between looks; while a worker has not connected
LOSSES, RESTARTS = 3, 3
GROW_S = 1.0  # that calls wait until a worker joins
IDLE_S = 60.0  # without a call, until a worker leaves


@dataclass(slots=True, eq=False)
class NodeProcess:
    """A worker on a node, and the calls that it was given."""

    role: str
    number: int
    host: Host
    idle_since: float  # or starting
    connection: Channel | None = None
    ready: bool = False
    tasks: dict[int, Task] = field(default_factory=dict)
    held: set[Any] = field(default_factory=set)  # what it keeps between calls
    silent_s: float = 0.0  # time that the thread listened since the last sign of life
    num_done: int = 0

    @property
    def channel(self) -> Channel:
        """Its channel, once it has connected."""
        assert self.connection is not None
        return self.connection

    @property
    def state(self) -> str:
        return "starting" if not self.ready else "serving" if self.tasks else "idle"

    @property
    def is_trying(self) -> bool:
        """True while it serves a call that may be what its workers die of."""
        return any(task.interrupted == LOSSES - 1 for task in self.tasks.values())

    def __str__(self) -> str:
        return f"{self.role} {self.number} (process {self.host.pid} on {self.host.node})"


class NodePool(TaskThread[T]):
    """The thread of a pool of workers on nodes.

    spawn: starts a worker's process. start: the message that starts its work. depth: calls that it
    is given at once. most: workers at most. heartbeat_s: without a sign of life, until one is lost.
    report: told of those that join, leave or are lost. clock: monotonic seconds.
    """

    role: ClassVar[str]  # of its workers; the config's key is cluster.<role>s

    def __init__(
        self,
        spawn: Spawn,
        *,
        start: Message,
        depth: int,
        most: int,
        heartbeat_s: float,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self._spawn, self._most, self._heartbeat_s = spawn, most, heartbeat_s
        self._report, self._clock = report, clock
        self._start = {"start": {**start, "beat_s": min(1.0, heartbeat_s / BEATS)}}
        self._depth = depth
        self._workers: dict[int, NodeProcess] = {}
        self._restarts = RestartLimit(RESTARTS + most - 1)  # a node may have all of them
        self._waiting_since = self._looked = clock()

    def status(self) -> list[dict[str, Any]]:
        return [
            {
                "role": f"{self.role} {number}",
                "node": worker.host.node,
                "pid": worker.host.pid,
                "state": worker.state,
                "requests": worker.num_done,
            }
            for number, worker in sorted(self._workers.copy().items())
        ]

    # ---------------------------------------------------------------- what the calls are

    def _encode(self, worker: NodeProcess, task: T) -> bytes:
        """Return the line of a call to a worker. Raises TypeError, ValueError or RecursionError."""
        raise NotImplementedError

    def _read(self, message: Message) -> Any:
        """Return the result in an answer; None if it is malformed."""
        raise NotImplementedError

    def _fail(self, task: T, error: str) -> None:
        """Settle a call that cannot be served."""
        raise NotImplementedError

    def _is_over(self, task: T) -> bool:
        """Settle a call that needs no worker any more, and return whether it is one."""
        return False

    def _settle(self, worker: NodeProcess, task: T, result: Any) -> None:
        task.future.set_result(result)

    # ---------------------------------------------------------------- the thread

    def _step(self) -> None:
        self._dispatch()
        self._scale()  # by what could not be given out
        for key, events in self._wait():
            if (worker := key.data) is None:
                self._waker.clear()
                continue
            if events & selectors.EVENT_READ and worker in self._workers.values():
                self._on_readable(worker)
            if events & selectors.EVENT_WRITE and worker in self._workers.values():
                self._flush(worker)
        for worker in [one for one in self._workers.values() if one.connection is None]:
            self._connect(worker)
        self._check_silence()

    def _wait(self) -> list[tuple[selectors.SelectorKey, int]]:
        due = len(self._todo) + sum(len(worker.tasks) for worker in self._workers.values())
        connecting = any(worker.connection is None for worker in self._workers.values())
        whom, what = (f"{self.role}s", f"{due} answers") if due else ("trainer", "calls")
        with watchdog.waiting_for(whom, what):
            return self._selector.select(CONNECTING_S if connecting else LOOK_S)

    def _check_silence(self) -> None:
        """Lose silent workers. Time in which this thread did not listen counts little."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, 2 * LOOK_S), now
        for worker in list(self._workers.values()):
            worker.silent_s += passed
            if worker.silent_s > self._heartbeat_s and worker in self._workers.values():
                stack = worker.host.stack() or "it has no stack: it was stopped, or had not begun"
                self._lose(worker, f"no sign of life for {self._heartbeat_s:g} s\n{stack}")

    # ---------------------------------------------------------------- workers

    def _scale(self) -> None:
        """Have a worker join when calls wait, and leave when it has none."""
        now, workers = self._clock(), self._workers.values()
        if not self._todo or not all(worker.ready for worker in workers):
            self._waiting_since = now
        if not workers and (self._todo or self._restarts.used < self._restarts.limit):
            self._join()
        elif len(workers) < self._most and now - self._waiting_since >= GROW_S:
            self._report(f"{self.role}s: {len(workers)} -> {len(workers) + 1}, as calls wait")
            self._join()
        idle = [w for w in workers if w.ready and not w.tasks and now - w.idle_since >= IDLE_S]
        idle = [worker for worker in idle if not worker.held]
        if idle and len(workers) > 1:
            self._report(f"{self.role}s: {len(workers)} -> {len(workers) - 1}, as one is idle")
            self._drop(max(idle, key=lambda worker: worker.number))

    def _join(self) -> None:
        number = next(n for n in itertools.count() if n not in self._workers)
        worker = NodeProcess(self.role, number, self._spawn(number), self._clock())
        self._workers[number] = worker

    def _connect(self, worker: NodeProcess) -> None:
        try:
            if (connection := worker.host.connect()) is None:
                return
        except EOFError:
            self._lose(worker, worker.host.how_it_ended())
            return
        worker.connection = connection
        self._selector.register(connection.socket, selectors.EVENT_READ, worker)
        connection.send(self._start)
        self._flush(worker)

    def _drop(self, worker: NodeProcess) -> None:
        del self._workers[worker.number]
        if worker.connection is not None:
            self._selector.unregister(worker.connection.socket)
        worker.host.end()

    def _lose(self, worker: NodeProcess, reason: str) -> None:
        """Kill a worker, and put its calls back in front."""
        lost = f"{worker} was lost while {worker.state}: {reason}"
        ends = worker.num_done == 0 and not self._restarts.spend()
        last_words = worker.host.last_words() if ends else ""
        self._drop(worker)
        for task in reversed(self._tasks_of(worker)):
            task.interrupted += 1
            if task.interrupted < LOSSES:
                self._todo.appendleft(task)
            else:
                self._fail(task, f"worker died: the whole {self.role}, {LOSSES} times; {reason}")
        self._report(f"{lost}; its {len(worker.tasks)} calls are served again")
        if ends:
            raise workers_lost(self.role, self._restarts.limit + 1, lost, last_words)

    def _give_up(self, error: BaseException) -> None:
        workers = list(self._workers.values())
        tasks = [task for worker in workers for task in self._tasks_of(worker)]
        for task in (*tasks, *self._todo):
            task.future.set_exception(error)
        self._todo.clear()
        for worker in workers:
            self._drop(worker)

    def _tasks_of(self, worker: NodeProcess) -> list[T]:
        return list(worker.tasks.values())  # type: ignore[arg-type]  # this pool gave them

    # ---------------------------------------------------------------- to and from a worker

    def _dispatch(self) -> None:
        """Give calls to the ready workers that have room."""
        while self._todo:
            task = self._todo.popleft()
            if self._is_over(task):
                continue
            if (worker := self._choose(task)) is None:
                self._todo.appendleft(task)
                return
            self._give(worker, task)

    def _choose(self, task: T) -> NodeProcess | None:
        """Choose the ready worker with the fewest calls, if any has room."""
        depth = self._depth if task.interrupted < LOSSES - 1 else 1
        ready = [w for w in self._workers.values() if w.ready and not w.is_trying]
        room = [worker for worker in ready if len(worker.tasks) < depth]
        return min(room, key=lambda one: (len(one.held), len(one.tasks)), default=None)

    def _give(self, worker: NodeProcess, task: T) -> None:
        try:
            line = self._encode(worker, task)
        except (TypeError, ValueError, RecursionError) as error:
            self._fail(task, f"the problem cannot be sent as JSON: {error}")
            return
        worker.tasks[task.index] = task
        worker.channel.send_line(line)
        self._flush(worker)

    def _on_readable(self, worker: NodeProcess) -> None:
        worker.silent_s = 0.0
        try:
            for message in worker.channel.receive():
                self._on_message(worker, message)
                if worker not in self._workers.values():  # its channel is closed
                    return
        except ProtocolError as error:
            self._lose(worker, f"it wrote what is {error}")
        except EOFError:
            self._lose(worker, worker.host.how_it_ended())

    def _on_message(self, worker: NodeProcess, message: Message) -> None:
        match message:
            case {"alive": True}:
                pass
            case {"ready": True}:
                worker.ready, worker.idle_since = True, self._clock()
            case {"error": {"what": _}}:
                error = read_error(message)
                error.where = f"{error.where}, {worker}"
                raise error
            case {"id": int(number)} if (
                number in worker.tasks and (result := self._read(message)) is not None
            ):
                worker.idle_since, worker.num_done = self._clock(), worker.num_done + 1
                self._restarts.reset()
                self._settle(worker, worker.tasks.pop(number), result)  # type: ignore[arg-type]
            case _:
                raise ProtocolError(f"not an answer: {str(message)[:200]}")
