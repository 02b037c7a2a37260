"""Crew: what RewardPool's thread does. It hands items to workers, holds the clock, kills, and
settles futures.

    any thread                this thread                                worker (1 .. workers, and spares)
    ----------                -----------                                ---------------------------------
    submit -> todo, wake  ->  _staff    fork asked of the template  ->   {"id": -1, "ready": true}
                              _feed     items, up to WINDOW ahead   ->   read one line, score, answer, read the next
    future <- _settle     <-  _hear     <- its socket               <-   {"id": 7, "reward": 1.0, ...}
                              _look     SIGKILL to its group when unanswered[0] has had timeout_s

    waits for: wake, the template's and the workers' sockets, the nearest deadline. Idle, it waits without a clock. While
    somebody waits for scores it looks up each LOOK_S: that is the sign of life of all of them, as every item has a clock here.
    The item in flight of a worker is its oldest unanswered one; it has timeout_s, for all functions together, from the
    moment it became the oldest.

What is behind an item that takes far longer than usual goes to a spare worker; patience.py says
when that is.
"""

import math
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from tandem.rewards.parts import cannot_load, part_name
from tandem.rewards.pool.processes import Item, Template, Worker, kill_worker
from tandem.rewards.pool.protocol import HELLO, decode, encode, read_score
from tandem.rewards.pool.stragglers import Patience
from tandem.runtime import watchdog
from tandem.types import Score

START_S = 60.0  # importing the user's module, on a cold disk under load
LOADING_S = 20.0  # importing Math-Verify, likewise; allowed once for each process
LOOK_S = 0.5
EXIT_S = 10.0  # between the end of a worker's socket and the news of its exit status
WINDOW = 16  # items sent ahead to a worker, so that it never waits for us
MAX_FAILED_STARTS = 3
NOT_AN_ANSWER = "worker died: it wrote what is not an answer"


class Crew:
    """started: set when the first worker is ready."""

    def __init__(
        self,
        functions: Sequence[str],
        plain: bool,
        arguments: tuple[str, ...],
        timeout_s: float,
        workers: int,
    ):
        self.started: Future[None] = Future()
        self.failures = {"timeout": 0, "died": 0, "exception": 0, "bad_value": 0}
        self._functions, self._plain, self._arguments = functions, plain, arguments
        self._timeout_s, self._max_workers = timeout_s, workers
        self._todo: deque[Item] = deque()  # nobody is at them
        self._template: Template | None = None
        self._workers: dict[int, Worker] = {}
        self._failed_starts = 0
        self._patience = Patience(timeout_s)
        self._lock = threading.Lock()  # of _closing, and of the bell's end
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._bell = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._bell, False)
        self._selector.register(self._woken, selectors.EVENT_READ)

    # ------------------------------------------------------------ called from other threads

    def add(self, item: Item) -> None:
        """Take an item to score. Raises RuntimeError if the thread has ended, or soon will."""
        with self._lock:
            if self._closing:
                raise RuntimeError("the reward pool is closed")
            self._todo.append(item)
            self._ring()

    def stop(self) -> None:
        """Let run end; what is not scored by then fails."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._ring()

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # it is full, so the thread will wake
            os.write(self._bell, b".")

    # ------------------------------------------------------------ the thread

    def run(self) -> None:
        """Until stop is called. Whatever ends it, no future is left waiting."""
        error: BaseException = RuntimeError("the reward pool is closed")
        try:
            self._start_template()
            while not self._closing:
                self._turn()
        except BaseException as broken:
            error = broken
        finally:
            with self._lock:
                self._closing = True
            self._give_up(error)
            self._selector.close()
            os.close(self._woken)
            os.close(self._bell)

    def _turn(self) -> None:
        """Give out what there is, wait for something to happen, and handle it."""
        self._staff()
        for worker in list(self._workers.values()):
            self._feed(worker)
        for key, events in self._wait():
            match key.data:
                case Worker() as worker:
                    if events & selectors.EVENT_READ and worker.number in self._workers:
                        self._hear(worker)
                    if events & selectors.EVENT_WRITE and worker.number in self._workers:
                        self._send(worker)
                case Template() as template:
                    if template is self._template:
                        self._hear_template(template)
                case _:
                    os.read(self._woken, 4096)
        self._look()

    def _wait(self) -> list[tuple[selectors.SelectorKey, int]]:
        seconds = self._until_next_look()
        if seconds is None:
            with watchdog.waits(of="trainer", what="something to score"):
                return self._selector.select()
        with watchdog.waits(
            of="reward workers",
            what=f"{len(self._workers)} at work, {len(self._todo)} scores to do",
        ):
            return self._selector.select(min(seconds, LOOK_S))

    def _until_next_look(self) -> float | None:
        """Seconds until a clock runs out; None where there is none."""
        nearest = min(
            (self._next_look(worker) for worker in self._workers.values()), default=math.inf
        )
        if self._template and not self._template.ready:
            nearest = min(nearest, self._template.deadline)
        return None if nearest == math.inf else max(0.0, nearest - time.monotonic())

    def _next_look(self, worker: Worker) -> float:
        if worker.ready and not worker.unanswered and not worker.closed:
            return math.inf
        return min(worker.deadline, self._patience.next_doubt(worker, others_wait=bool(self._todo)))

    def _give_up(self, error: BaseException) -> None:
        """Everything that is not scored fails with the error, and every process ends."""
        self._failed_starts = 0
        items = [item for worker in self._workers.values() for item in worker.unanswered]
        for worker in list(self._workers.values()):
            self._drop(worker)
        if self._template:
            self._end_template(self._template)
        while self._todo:
            items.append(self._todo.popleft())
        for item in items:
            item.future.set_exception(error)
        if not self.started.done():
            self.started.set_exception(error)

    # ------------------------------------------------------------ processes

    def _start_template(self) -> None:
        self._template = Template(self._arguments, START_S)
        self._selector.register(self._template.socket, selectors.EVENT_READ, self._template)

    def _end_template(self, template: Template) -> int:
        self._selector.unregister(template.socket)
        self._template = None
        return template.close()

    def _staff(self) -> None:
        """As many workers as there is work for, and one at least; late ones do not count, but for
        those that wait."""
        if self._template is None and (self._todo or not self.started.done()):
            self._start_template()
        if self._template and self._template.ready:
            there = [worker for worker in self._workers.values() if not worker.late or worker.waits]
            busy = sum(bool(worker.unanswered) for worker in there)
            for _ in range(len(there), min(self._max_workers, max(1, busy + len(self._todo)))):
                worker = self._template.fork(START_S)
                self._workers[worker.number] = worker
                self._selector.register(worker.socket, selectors.EVENT_READ, worker)

    def _drop(self, worker: Worker) -> None:
        """Kill it; whoever calls this has its items."""
        del self._workers[worker.number]
        if not worker.closed:
            self._selector.unregister(worker.socket)
        worker.kill()

    def _replace(self, worker: Worker) -> None:
        """Kill it and put what it has not answered back in front."""
        self._drop(worker)
        self._todo.extendleft(reversed(worker.unanswered))

    def _blame(self, worker: Worker, kind: str, error: str) -> None:
        """The item in flight pays for its worker; the ones behind it go to another. An idle worker
        has none."""
        if worker.unanswered:
            named = error if self._plain else f"{part_name(self._functions[worker.at])}: {error}"
            self._patience.killed(worker)
            self._fail(worker.unanswered.popleft(), kind, named)
        elif not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS or kind == "timeout":
                self._give_up(
                    cannot_load(
                        self._functions[worker.at], f"while it was being loaded: {error}", ""
                    )
                )
                return
        self._replace(worker)

    def _look(self) -> None:
        """Find who is late, or out of time; whatever they wrote before counts."""
        now = time.monotonic()
        self._patience.look(self._workers.values(), now)
        for worker in list(self._workers.values()):
            while (
                worker.number in self._workers
                and now >= self._next_look(worker)
                and self._hear(worker)
            ):
                pass
            if worker.number not in self._workers or now < self._next_look(worker):
                continue
            if now < worker.deadline:
                self._doubt(worker, now)
            elif worker.closed:
                self._blame(worker, "died", "worker died: it closed its pipe")
            else:
                limit = self._timeout_s if worker.ready else START_S
                self._blame(worker, "timeout", f"timeout after {limit} s")
        template = self._template
        if template and not template.ready and now >= template.deadline:
            template.process.kill()
            found = f"while it was being loaded: timeout after {START_S} s"
            self._give_up(cannot_load(self._functions[template.at], found, ""))

    def _doubt(self, worker: Worker, now: float) -> None:
        """If it is late, give what is behind unanswered[0] to others, for _staff counts it no more;
        perhaps put it last."""
        worker.looked = now
        too_much = self._patience.too_much(worker)
        if not worker.late and (
            too_much or now >= worker.began + self._patience.late_after(worker)
        ):
            worker.late, worker.waits = True, worker.sleeps()
            head = worker.unanswered.popleft()
            self._todo.extendleft(reversed(worker.unanswered))
            worker.unanswered = deque([head])
        if too_much:
            worker.put_last()

    # ------------------------------------------------------------ messages

    def _feed(self, worker: Worker) -> None:
        """Send the worker its share of what waits, the smaller the nearer the end, and at most
        WINDOW ahead."""
        if not worker.unanswered and self._todo and worker.ready and not worker.closed:
            self._hear(worker)  # it may have died idle, and then no item is to blame
        if not worker.ready or worker.late or worker.closed or worker.number not in self._workers:
            return
        share = max(1, min(WINDOW, len(self._todo) // (2 * self._max_workers)))
        while self._todo and len(worker.unanswered) < share:
            item = self._todo.popleft()
            try:  # no sooner: lines may be long, and many wait
                line = encode(item.index, item.problem, item.attempt)
            except (TypeError, ValueError, RecursionError) as error:
                self._fail(item, "exception", f"the problem cannot be sent as JSON: {error}")
                continue
            if not worker.unanswered:
                worker.turn_to_next(time.monotonic(), self._timeout_s)
            worker.unanswered.append(item)
            worker.outgoing += line
        if worker.outgoing:
            self._send(worker)

    def _send(self, worker: Worker) -> None:
        if worker.closed:
            return
        worker.write()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outgoing else 0)
        self._selector.modify(worker.socket, events, worker)

    def _hear(self, worker: Worker) -> bool:
        """Take what the worker wrote; false if there was nothing to take."""
        lines, more = worker.read()
        for line in lines:
            if worker.number in self._workers:
                self._settle(worker, decode(line))
        if worker.number in self._workers and worker.flooded:
            self._blame(worker, "died", NOT_AN_ANSWER)
        # why, the template will say
        if worker.number in self._workers and not more and not worker.closed:
            worker.closed = True
            worker.deadline = time.monotonic() + (
                EXIT_S if worker.is_ending() else 0.0
            )  # it lives, and can answer no more
            self._selector.unregister(worker.socket)
        return bool(lines)

    def _settle(self, worker: Worker, message: dict[str, Any]) -> None:
        """Take one message of a worker."""
        expected = (
            worker.unanswered[0].index if worker.unanswered else None if worker.ready else HELLO
        )
        if expected is None or message.get("id") != expected:
            self._blame(worker, "died", NOT_AN_ANSWER)
        elif message.get("at") == worker.at + 1 < len(self._functions):
            worker.at += 1
        elif not worker.ready:
            self._greet(worker, message)
        elif "loading" in message and worker.loading_notes:
            self._allow_loading(worker, message["loading"] is True)
        else:
            self._take(worker, message)

    def _greet(self, worker: Worker, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._give_up(
                cannot_load(
                    self._functions[worker.at],
                    str(message["failed"]),
                    str(message.get("where", "")),
                )
            )
            return
        worker.ready, worker.at = True, 0
        if not self.started.done():
            self.started.set_result(None)

    def _allow_loading(self, worker: Worker, begins: bool) -> None:
        now = time.monotonic()
        worker.loading_notes -= 1
        # the function that loads is still at it
        worker.start_clock(now, LOADING_S if begins else self._timeout_s)
        if begins:
            worker.began = math.inf  # it is not late
        elif self._template:
            self._template.preload("math_verify")

    def _take(self, worker: Worker, message: dict[str, Any]) -> None:
        score, kind = read_score(message)
        if score is None:
            self._blame(worker, "died", NOT_AN_ANSWER)
            return
        now = time.monotonic()
        self._patience.answered(worker, now)
        item = worker.unanswered.popleft()
        worker.turn_to_next(now, self._timeout_s)
        worker.answered += 1
        self._failed_starts = 0
        if kind:
            self.failures[kind] += 1
        if worker.late or message["last"]:
            self._replace(worker)
        item.future.set_result(score)

    def _fail(self, item: Item, kind: str, error: str) -> None:
        self.failures[kind] += 1
        item.future.set_result(Score(reward=0.0, parts={}, error=error))

    # ------------------------------------------------------------ the template's messages

    def _hear_template(self, template: Template) -> None:
        messages, alive = template.messages()
        for message in messages:
            match message:
                case {"forked": int(number), "pid": int(pid)} if number in self._workers:
                    self._workers[number].pid = pid
                # it was dropped before anybody knew its process
                case {"forked": int(), "pid": int(pid)}:
                    kill_worker(pid)
                case {"exited": int(number), "status": int(status)} if number in self._workers:
                    self._bury(
                        self._workers[number],
                        f"signal {-status}" if status < 0 else f"exit {status}",
                    )
                case {"id": int(), "at": int(at)} if at < len(self._functions):
                    template.at = at
                case {"id": int(), "ready": True}:
                    template.ready = True
                case {"id": int(), "failed": str(failed), "where": str(where)}:
                    self._give_up(cannot_load(self._functions[template.at], failed, where))
                    return
        if not alive:
            self._lose_template(template)

    def _bury(self, worker: Worker, how: str) -> None:
        """A worker has ended; what it wrote before counts."""
        while worker.number in self._workers and not worker.closed and self._hear(worker):
            pass
        if worker.number in self._workers:
            self._blame(worker, "died", f"worker died: {how}")

    def _lose_template(self, template: Template) -> None:
        """Somebody has killed it, and all workers with it. Which item did, nobody knows: none is
        tried three times."""
        status = self._end_template(template)
        # then nothing is learnt by it
        if not any(worker.unanswered for worker in self._workers.values()):
            self._failed_starts += 1
        how = f"worker died: {f'signal {-status}' if status < 0 else f'exit {status}'}"
        if not template.ready or self._failed_starts >= MAX_FAILED_STARTS:
            self._give_up(
                cannot_load(self._functions[template.at], f"while it was being loaded: {how}", "")
            )
        for worker in list(self._workers.values()):
            if worker.unanswered:
                worker.unanswered[0].interrupted += 1
                if worker.unanswered[0].interrupted == 2:
                    self._blame(worker, "died", "worker died: with all others, twice")
                    continue
            self._replace(worker)
