"""The thread of reward workers on the nodes of a cluster. Does not know Ray.

    any thread             this thread                               a node (reward_worker.py)
    ----------             -----------                               -------------------------
    submit -> todo, wake   _dispatch  at most `depth` calls each -->  its RewardPool scores
                           _scale     between 1 and `most` workers
    future <- _on_message  _on_readable                          <--  {"id": 7, "reward": ...}
                           _check_silence   its calls go to others

Waits for: wake and the workers' sockets, at most LOOK_S. Deadlines of calls are the matter of a
node's pool. Calls of a lost worker are served again, one that was lost with LOSSES workers has an
error. When RESTARTS workers in a row are lost without a score, the next one fails what waits.
"""

import itertools
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tandem.cluster.errors import reward_workers_lost
from tandem.engine.worker_pool.pool import BEATS
from tandem.engine.worker_pool.process import Host, Spawn
from tandem.engine.worker_pool.protocol import read_error
from tandem.rewards.pool.processes import ScoringTask
from tandem.rewards.pool.protocol import read_score, request_line
from tandem.rewards.pool.task_thread import TaskThread
from tandem.runtime import watchdog
from tandem.runtime.worker_channel import Channel, Message, ProtocolError, RestartLimit
from tandem.types import Score

LOOK_S, CONNECTING_S = 0.5, 0.05  # between looks; while a worker has not connected
LOSSES, RESTARTS = 3, 3
GROW_S = 1.0  # that calls wait until a worker joins
IDLE_S = 60.0  # without a call, until a worker leaves


@dataclass(slots=True, eq=False)
class RewardProcess:
    """A reward worker on a node, and the calls that it was given."""

    number: int
    host: Host
    idle_since: float  # or starting
    connection: Channel | None = None
    ready: bool = False
    tasks: dict[int, ScoringTask] = field(default_factory=dict)
    silent_s: float = 0.0  # time that the thread listened since the last sign of life
    num_scored: int = 0

    @property
    def channel(self) -> Channel:
        """Its channel, once it has connected."""
        assert self.connection is not None
        return self.connection

    @property
    def state(self) -> str:
        return "starting" if not self.ready else "scoring" if self.tasks else "idle"

    def __str__(self) -> str:
        return f"reward worker {self.number} (process {self.host.pid} on {self.host.node})"


class RewardActors(TaskThread):
    """The thread of a TaskPool on a cluster.

    spawn: starts a worker's process. pool: the arguments of its RewardPool. folder: where relative
    names are looked for. most: workers at most. heartbeat_s: without a sign of life, until one is
    lost. report: told of those that join, leave or are lost. clock: monotonic seconds.
    """

    def __init__(
        self,
        spawn: Spawn,
        *,
        pool: dict[str, Any],
        folder: str,
        most: int,
        heartbeat_s: float,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self._spawn, self._most, self._heartbeat_s = spawn, most, heartbeat_s
        self._report, self._clock = report, clock
        beat_s = min(1.0, heartbeat_s / BEATS)
        self._start = {"start": {"pool": pool, "folder": folder, "beat_s": beat_s}}
        self._depth = 2 * pool["workers"]  # one is scored while the next one is on its way
        self._workers: dict[int, RewardProcess] = {}
        self._restarts = RestartLimit(RESTARTS)
        self._waiting_since = self._looked = clock()

    def status(self) -> list[dict[str, Any]]:
        return [
            {
                "role": f"reward worker {number}",
                "node": worker.host.node,
                "pid": worker.host.pid,
                "state": worker.state,
                "requests": worker.num_scored,
            }
            for number, worker in sorted(self._workers.copy().items())
        ]

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
        whom, what = ("reward workers", f"{due} scores") if due else ("trainer", "calls")
        with watchdog.waiting_for(whom, what):
            return self._selector.select(CONNECTING_S if connecting else LOOK_S)

    def _check_silence(self) -> None:
        """Lose silent workers. Time in which this thread did not listen counts little."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, 2 * LOOK_S), now
        for worker in list(self._workers.values()):
            worker.silent_s += passed
            if worker.silent_s > self._heartbeat_s:
                stack = worker.host.stack() or "it has no stack: it was stopped, or had not begun"
                self._lose(worker, f"no sign of life for {self._heartbeat_s:g} s\n{stack}")

    # ---------------------------------------------------------------- workers

    def _scale(self) -> None:
        """Have a worker join when calls wait, and leave when it has none."""
        now, workers = self._clock(), self._workers.values()
        if not self._todo or not all(worker.ready for worker in workers):
            self._waiting_since = now
        if not workers and (self._todo or self._restarts.used < RESTARTS):
            self._join()
        elif len(workers) < self._most and now - self._waiting_since >= GROW_S:
            self._report(f"reward workers: {len(workers)} -> {len(workers) + 1}, as calls wait")
            self._join()
        idle = [w for w in workers if w.ready and not w.tasks and now - w.idle_since >= IDLE_S]
        if idle and len(workers) > 1:
            self._report(f"reward workers: {len(workers)} -> {len(workers) - 1}, as one is idle")
            self._drop(max(idle, key=lambda worker: worker.number))

    def _join(self) -> None:
        number = next(n for n in itertools.count() if n not in self._workers)
        self._workers[number] = RewardProcess(number, self._spawn(number), self._clock())

    def _connect(self, worker: RewardProcess) -> None:
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

    def _drop(self, worker: RewardProcess) -> None:
        del self._workers[worker.number]
        if worker.connection is not None:
            self._selector.unregister(worker.connection.socket)
        worker.host.end()

    def _lose(self, worker: RewardProcess, reason: str) -> None:
        """Kill a worker, and put its calls back in front."""
        lost = f"{worker} was lost while {worker.state}: {reason}"
        last_words = worker.host.last_words()
        self._drop(worker)
        for task in reversed(worker.tasks.values()):
            task.interrupted += 1
            if task.interrupted < LOSSES:
                self._todo.appendleft(task)
            else:
                self._fail(task, f"worker died: with its node's pool, {LOSSES} times; {reason}")
        self._report(f"{lost}; its {len(worker.tasks)} calls are served again")
        if not self._restarts.spend():
            self._give_up(reward_workers_lost(RESTARTS + 1, lost, last_words))

    def _fail(self, task: ScoringTask, error: str) -> None:
        task.future.set_result(Score(reward=0.0, parts={}, error=error))

    def _give_up(self, error: BaseException) -> None:
        tasks = [task for worker in self._workers.values() for task in worker.tasks.values()]
        for worker in list(self._workers.values()):
            self._drop(worker)
        while self._todo:
            tasks.append(self._todo.popleft())
        for task in tasks:
            task.future.set_exception(error)

    # ---------------------------------------------------------------- to and from a worker

    def _dispatch(self) -> None:
        """Give calls to the ready workers with the fewest."""
        while self._todo:
            room = [w for w in self._workers.values() if w.ready and len(w.tasks) < self._depth]
            if not room:
                return
            worker, task = min(room, key=lambda one: len(one.tasks)), self._todo.popleft()
            try:
                line = request_line(task.index, task.problem, task.attempt)
            except (TypeError, ValueError, RecursionError) as error:
                self._fail(task, f"the problem cannot be sent as JSON: {error}")
                continue
            worker.tasks[task.index] = task
            worker.channel.send_line(line)
            self._flush(worker)

    def _on_readable(self, worker: RewardProcess) -> None:
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

    def _on_message(self, worker: RewardProcess, message: Message) -> None:
        score, _ = read_score(message)
        match message:
            case {"alive": True}:
                pass
            case {"ready": True}:
                worker.ready, worker.idle_since = True, self._clock()
            case {"id": int(number)} if number in worker.tasks and score is not None:
                worker.idle_since, worker.num_scored = self._clock(), worker.num_scored + 1
                self._restarts.reset()
                worker.tasks.pop(number).future.set_result(score)
            case {"error": {"what": _}}:
                error = read_error(message)
                error.where = f"{error.where}, {worker}"
                self._give_up(error)
            case _:
                raise ProtocolError(f"not an answer: {str(message)[:200]}")
