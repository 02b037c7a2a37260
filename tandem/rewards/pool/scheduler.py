"""PoolScheduler: the thread of a RewardPool. Gives tasks to workers, holds the clock, kills, and
settles futures.

    any thread             this thread                            worker (1 .. max_workers)
    ----------             -----------                            -------------------------
    submit -> todo, wake   _spawn_workers  asks the fork server   {"id": -1, "ready": true}
                           _dispatch       up to WINDOW ahead ->  read a line, score, answer
    future <- _on_score    _on_readable    its socket         <-  {"id": 7, "reward": 1.0, ...}
                           _check_deadlines   SIGKILL when the task in flight has had timeout_s
                           _check_stragglers  tasks behind a long one go to other workers

Waits for: wake, the sockets of fork server and workers, the nearest deadline; without a deadline it
waits without a clock. While scores are due it looks up each LOOK_S. That is the sign of life of all
workers, as every task has a deadline here. The task in flight of a worker is its oldest one; it has
timeout_s, for all functions together, from the moment it became the oldest.
"""

import math
import selectors
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from tandem.rewards.parts import cannot_load, part_name
from tandem.rewards.pool.processes import ForkServer, ScoringTask, Worker
from tandem.rewards.pool.protocol import HELLO, read_score, request_line
from tandem.rewards.pool.stragglers import CHECK_S, StragglerDetector
from tandem.rewards.pool.task_thread import TaskThread
from tandem.runtime import watchdog
from tandem.runtime.worker_channel import (
    Message,
    ProtocolError,
    RestartLimit,
    exit_reason,
    kill_group,
)
from tandem.types import Score

START_S = 60.0  # importing the user's module, on a cold disk under load
LOADING_S = 20.0  # importing Math-Verify, likewise; allowed once for each process
EXIT_S = 5.0  # from the end of a worker's socket to its exit status
LOOK_S = 0.5
WINDOW = 16  # tasks sent ahead to a worker, so that it never waits for us
RESTARTS = 2  # of fork server or workers that fail in a row and score nothing
NOT_AN_ANSWER = "worker died: it wrote what is not an answer"
CLOSED = "died", "worker died: it closed its pipe"


class PoolScheduler(TaskThread[ScoringTask]):
    """The thread of a RewardPool. started: set when the first worker is ready. clock: monotonic
    seconds."""

    def __init__(
        self,
        functions: Sequence[str],
        arguments: tuple[str, ...],
        *,
        name_function: bool,
        timeout_s: float,
        max_workers: int,
        clock: Callable[[], float],
    ):
        super().__init__()
        self.started: Future[None] = Future()
        self.failures = {"timeout": 0, "died": 0, "exception": 0, "bad_value": 0}
        self._functions, self._arguments, self._name_function = functions, arguments, name_function
        self._timeout_s, self._max_workers, self._clock = timeout_s, max_workers, clock
        self._fork_server: ForkServer | None = None
        self._workers: dict[int, Worker] = {}
        self._restarts = RestartLimit(RESTARTS)
        self._stragglers, self._next_check = StragglerDetector(), 0.0

    # ---------------------------------------------------------------- the thread

    def _step(self) -> None:
        """Give out tasks, wait for something to happen, and handle it."""
        self._spawn_workers()
        for worker in list(self._workers.values()):
            self._dispatch(worker)
        for key, events in self._wait():
            match key.data:
                case Worker() as worker if not worker.dropped:
                    if events & selectors.EVENT_WRITE:
                        self._flush(worker)
                    if events & selectors.EVENT_READ:
                        self._on_readable(worker)
                case ForkServer() as server if server is self._fork_server:
                    if events & selectors.EVENT_WRITE:
                        self._flush(server)
                    if events & selectors.EVENT_READ:
                        self._on_server_readable(server)
                case None:
                    self._waker.clear()
        self._check_deadlines()
        self._check_stragglers()

    def _wait(self) -> list[tuple[selectors.SelectorKey, int]]:
        nearest = min((worker.deadline for worker in self._workers.values()), default=math.inf)
        if self._fork_server:
            nearest = min(nearest, self._fork_server.deadline)
        if nearest == math.inf:
            with watchdog.waiting_for("trainer", "something to score"):
                return self._selector.select()
        what = f"{len(self._workers)} at work, {len(self._todo)} scores to do"
        waiting = self._todo or any(len(worker.tasks) > 1 for worker in self._workers.values())
        look_s = CHECK_S if waiting else LOOK_S
        with watchdog.waiting_for("reward workers", what):
            return self._selector.select(min(max(0.0, nearest - self._clock()), look_s))

    def _check_deadlines(self) -> None:
        """Kill processes that are out of time; their earlier lines count."""
        now = self._clock()
        for worker in [w for w in self._workers.values() if now >= w.deadline]:
            if not worker.closed:
                self._on_readable(worker)
            if now >= worker.deadline and not worker.dropped:
                late = "timeout", f"timeout after {self._timeout_s if worker.ready else START_S} s"
                self._fail_current(worker, *(CLOSED if worker.closed else late))
        server = self._fork_server
        if server and now >= server.deadline:
            server.process.kill()
            self._fail_loading(server.function, f"timeout after {START_S} s")

    def _check_stragglers(self) -> None:
        """Give the tasks behind a straggler, or any task while a worker is idle, to others."""
        now = self._clock()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_S
        workers = self._workers.values()
        self._stragglers.mark(workers, others_wait=bool(self._todo))
        idle = not self._todo and any(w.ready and not w.tasks and not w.closed for w in workers)
        for worker in workers:
            if len(worker.tasks) > 1 and (idle or worker.straggler):
                worker.last_task = True  # it would score the ones behind it all the same
                while len(worker.tasks) > 1:
                    self._todo.appendleft(worker.tasks.pop())

    def _give_up(self, error: BaseException) -> None:
        """End every process and fail the unscored tasks with the error."""
        self._restarts.reset()
        tasks = [task for worker in self._workers.values() for task in worker.tasks]
        for worker in list(self._workers.values()):
            self._drop(worker)
        if self._fork_server:
            self._end_fork_server(self._fork_server)
        while self._todo:
            tasks.append(self._todo.popleft())
        for task in tasks:
            task.future.set_exception(error)
        if not self.started.done():
            self.started.set_exception(error)

    def _fail_loading(self, function: int, reason: str) -> None:
        self._give_up(
            cannot_load(self._functions[function], f"while it was being loaded: {reason}", "")
        )

    # ---------------------------------------------------------------- processes

    def _start_fork_server(self) -> None:
        server = self._fork_server = ForkServer(self._arguments, self._clock() + START_S)
        self._selector.register(server.channel.socket, selectors.EVENT_READ, server)

    def _end_fork_server(self, server: ForkServer) -> int:
        self._selector.unregister(server.channel.socket)
        self._fork_server = None
        return server.close()

    def _spawn_workers(self) -> None:
        """Fork workers for the tasks there are, at least one; stragglers are not counted."""
        if self._fork_server is None and (self._todo or not self.started.done()):
            self._start_fork_server()
        server = self._fork_server
        if server is None or not server.ready:
            return
        counted = [worker for worker in self._workers.values() if not worker.straggler]
        busy = sum(bool(worker.tasks) for worker in counted)
        wanted = min(self._max_workers, max(1, busy + len(self._todo)))
        for _ in range(len(counted), wanted):
            worker = server.fork(self._clock() + START_S)
            self._workers[worker.number] = worker
            self._selector.register(worker.channel.socket, selectors.EVENT_READ, worker)
        self._flush(server)

    def _drop(self, worker: Worker) -> None:
        """Kill a worker; the caller has its tasks."""
        del self._workers[worker.number]
        worker.dropped = True
        if not worker.closed:
            self._selector.unregister(worker.channel.socket)
        worker.kill()

    def _replace(self, worker: Worker) -> None:
        """Kill a worker and put its tasks back in front."""
        self._drop(worker)
        self._todo.extendleft(reversed(worker.tasks))

    def _fail_current(self, worker: Worker, kind: str, error: str) -> None:
        """Fail the task in flight, kill its worker and requeue the tasks behind it."""
        if worker.tasks:
            name = f"{part_name(self._functions[worker.function])}: " * self._name_function
            self._stragglers.on_kill(worker)
            self._fail(worker.tasks.popleft(), kind, name + error)
        elif not worker.ready and (kind == "timeout" or not self._restarts.spend()):
            self._fail_loading(worker.function, error)
            return
        self._replace(worker)

    def _fail(self, task: ScoringTask, kind: str, error: str) -> None:
        self.failures[kind] += 1
        task.future.set_result(Score(reward=0.0, parts={}, error=error))

    # ---------------------------------------------------------------- to a worker

    def _dispatch(self, worker: Worker) -> None:
        """Send a worker its share of the tasks, at most WINDOW ahead and fewer near the end."""
        if self._todo and worker.ready and not worker.tasks and not worker.closed:
            self._on_readable(worker)  # it may have died idle, and then no task is to blame
        if not worker.ready or worker.last_task or worker.closed or worker.dropped:
            return
        share = max(1, min(WINDOW, len(self._todo) // (2 * self._max_workers)))
        while self._todo and len(worker.tasks) < share:
            task = self._todo.popleft()
            try:  # not before now: lines may be long, and many tasks wait
                line = request_line(task.index, task.problem, task.attempt)
            except (TypeError, ValueError, RecursionError) as error:
                self._fail(task, "exception", f"the problem cannot be sent as JSON: {error}")
                continue
            worker.tasks.append(task)
            if len(worker.tasks) == 1:
                worker.start_task(self._clock(), self._timeout_s)
            worker.channel.send_line(line)
        self._flush(worker)

    # ---------------------------------------------------------------- from a worker

    def _on_readable(self, worker: Worker) -> None:
        try:
            for message in worker.channel.receive():
                self._on_message(worker, message)
                if worker.dropped:
                    return
        except ProtocolError:
            self._fail_current(worker, "died", NOT_AN_ANSWER)
        except EOFError:
            self._selector.unregister(worker.channel.socket)
            worker.closed = True
            worker.deadline = min(worker.deadline, self._clock() + EXIT_S)
            if not worker.is_exiting():  # else the fork server will say why
                self._fail_current(worker, *CLOSED)

    def _on_message(self, worker: Worker, message: Message) -> None:
        expected = worker.tasks[0].index if worker.tasks else None if worker.ready else HELLO
        if expected is None or message.get("id") != expected:
            self._fail_current(worker, "died", NOT_AN_ANSWER)
        elif message.get("at") == worker.function + 1 < len(self._functions):
            worker.function += 1
        elif not worker.ready:
            self._on_hello(worker, message)
        elif "loading" in message and worker.loading_notes:
            self._on_loading(worker, message["loading"] is True)
        else:
            self._on_score(worker, message)

    def _on_hello(self, worker: Worker, message: Message) -> None:
        if "failed" in message:
            failed, where = str(message["failed"]), str(message.get("where", ""))
            self._give_up(cannot_load(self._functions[worker.function], failed, where))
            return
        worker.ready = True
        worker.start_task(self._clock(), self._timeout_s)
        if not self.started.done():
            self.started.set_result(None)

    def _on_loading(self, worker: Worker, begins: bool) -> None:
        """Allow for an import of Math-Verify, and have it in the workers to come."""
        worker.loading_notes -= 1
        if begins:
            worker.start_loading(self._clock(), LOADING_S)
            return
        worker.end_loading(self._clock(), self._timeout_s)
        if self._fork_server:
            self._fork_server.preload("math_verify")

    def _on_score(self, worker: Worker, message: Message) -> None:
        score, kind = read_score(message)
        if score is None:
            self._fail_current(worker, "died", NOT_AN_ANSWER)
            return
        self._stragglers.on_score(worker)
        task = worker.tasks.popleft()
        worker.start_task(self._clock(), self._timeout_s)
        self._restarts.reset()
        if kind:
            self.failures[kind] += 1
        if message["last"] or worker.last_task:
            self._replace(worker)
        task.future.set_result(score)

    # ---------------------------------------------------------------- from the fork server

    def _on_server_readable(self, server: ForkServer) -> None:
        try:
            for message in server.channel.receive():
                self._on_server_message(server, message)
                if server is not self._fork_server:
                    return
        except (EOFError, ProtocolError):
            self._on_server_exit(server)

    def _on_server_message(self, server: ForkServer, message: Message) -> None:
        match message:
            case {"forked": int(number), "pid": int(pid)} if number in self._workers:
                self._workers[number].pid = pid
            case {"forked": int(), "pid": int(pid)}:  # dropped before its process was known
                kill_group(pid)
            case {"exited": int(number), "status": int(status)} if number in self._workers:
                self._on_exit(self._workers[number], status)
            case {"id": int(), "at": int(function)} if function < len(self._functions):
                server.function = function
            case {"id": int(), "ready": True}:
                server.ready, server.deadline = True, math.inf
            case {"id": int(), "failed": str(failed), "where": str(where)}:
                self._give_up(cannot_load(self._functions[server.function], failed, where))

    def _on_exit(self, worker: Worker, status: int) -> None:
        """Blame the task in flight of a worker that has ended; the worker's earlier lines count. No
        task is to blame for a SIGKILL, the first time: it comes from outside."""
        if not worker.closed:
            self._on_readable(worker)
        reason = f"worker died: {exit_reason(status)}"
        if worker.dropped:
            return
        if status == -signal.SIGKILL:
            self._interrupt(worker, reason)
        else:
            self._fail_current(worker, "died", reason)

    def _interrupt(self, worker: Worker, error: str) -> None:
        """Have all tasks of a killed worker scored again, the one in flight once."""
        if worker.tasks:
            worker.tasks[0].interrupted += 1
        if not worker.tasks or worker.tasks[0].interrupted == 2:
            self._fail_current(worker, "died", error)
        else:
            self._replace(worker)

    def _on_server_exit(self, server: ForkServer) -> None:
        """Start again after the fork server died with all workers. It is unknown which task killed
        it, so a task that was in flight twice fails."""
        reason = f"worker died: {exit_reason(self._end_fork_server(server))}"
        scoring = any(worker.tasks for worker in self._workers.values())
        if not server.ready or not (scoring or self._restarts.spend()):
            self._fail_loading(server.function, reason)
        for worker in list(self._workers.values()):
            if worker.tasks:
                self._interrupt(worker, "worker died: with all others, twice")
            else:
                self._replace(worker)
