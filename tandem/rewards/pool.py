"""RewardPool: scores texts in killable worker processes; the clock is here, outside of what it times.

It knows how to start, feed, time and kill a worker, and not what a reward is: that is worker.py. A text can cost its
own score only. Scores come back in the order of the items, whichever worker made them.

    caller's thread                                      worker process (1 .. workers), own session
    ---------------                                      ------------------------------------------
    _spawn   -> starter thread -> Popen                  load the functions
    _turn    <- selector <- stdout                <-     {"id": -1, "ready": true}
    _feed    -> outgoing -> stdin                 ->     read one line, score, answer, read the next
    _turn    <- selector <- stdout, _settle       <-     {"id": 7, "reward": 1.0, ...}
    _expire  SIGKILL to the session

    _turn   waits for: a readable or writable pipe, the nearest deadline, or 0.25 s.
    worker  waits for: its stdin. Unblocked by a line, or by its end when we are gone.
    The item in flight of a worker is its oldest unanswered one; it has timeout_s, for all functions together, from the
    moment it became the oldest.
    The starter thread only calls Popen: Linux kills a worker when the *thread* that started it ends, and the caller's
    thread may be short-lived, while this one lives as long as the pool.
"""

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np

from tandem.errors import UserError
from tandem.rewards.worker import HELLO, check_functions, part_name
from tandem.types import Problem, Score

TEXT_CHARS = 20_000  # what of a text travels: its end, where the answer is
PROBLEM_BYTES = 4 * 2**20
LINE_BYTES = 2**20  # no answer is longer
START_S = 60.0  # importing the user's module, on a cold disk under load
LOADING_S = 20.0  # importing Math-Verify, likewise; allowed once for each process
POLL_S = 0.25
WINDOW = 16  # items sent ahead to a worker, so that it never waits for us
MAX_FAILED_STARTS = 3
NOT_AN_ANSWER = "worker died: it wrote what is not an answer"


@dataclass(slots=True, eq=False)
class _Worker:
    """One process; unanswered[0] is what it is at, HELLO while it starts."""

    process: subprocess.Popen[bytes]
    deadline: float  # monotonic seconds, of unanswered[0]
    unanswered: deque[int] = field(default_factory=lambda: deque([HELLO]))
    outgoing: bytearray = field(default_factory=bytearray)
    incoming: bytearray = field(default_factory=bytearray)
    loading_notes: int = 2  # how many more are believed: the import begins, and has ended
    at: int = 0  # the function that scores unanswered[0], or is being loaded

    def next_item(self, timeout_s: float) -> None:
        """unanswered[0] is answered; the clock of the one behind it starts."""
        self.unanswered.popleft()
        self.at = 0
        self.deadline = time.monotonic() + timeout_s

    def late(self) -> bool:
        return bool(self.unanswered) and time.monotonic() > self.deadline

    @property
    def stdin(self) -> int:
        return self.process.stdin.fileno()  # type: ignore[union-attr]

    @property
    def stdout(self) -> int:
        return self.process.stdout.fileno()  # type: ignore[union-attr]


@dataclass(slots=True)
class _Batch:
    """The items of one call and what is known of them."""

    items: Sequence[tuple[Problem, str]]
    scores: list[Score | None]
    todo: deque[int]  # not sent, or to be sent again
    left: int  # items without a score

    @classmethod
    def of(cls, items: Sequence[tuple[Problem, str]]) -> "_Batch":
        return cls(items, [None] * len(items), deque(range(len(items))), len(items))

    def settle(self, index: int, score: Score) -> None:
        self.scores[index] = score
        self.left -= 1


class RewardPool:
    """Scores completions with functions (`answer`, `module:function`, `file.py:function`; see worker.py).

    Example: RewardPool("answer", timeout_s=5.0, workers=1).score(problem, ["Answer: 3"]) gives
    [Score(reward=1.0, parts={"answer": 1.0})]. With several functions, or weights, the reward is the sum of
    weight x reward in their order, and each function's reward and parts are parts (worker.weigh has their names).
    A text that cannot be scored has reward 0 and says why in its error, and in which of several functions; failures
    counts those by kind. Raises UserError if a function cannot be loaded. One caller at a time.
    """

    def __init__(
        self, functions: str | Sequence[str], timeout_s: float = 5.0, workers: int = 1, *,
        weights: Sequence[float] = (), memory_mb: int = 2048,
    ):  # fmt: skip
        self.failures = {"timeout": 0, "died": 0, "exception": 0, "bad_value": 0}
        self._functions = (functions,) if isinstance(functions, str) else tuple(functions)
        self._weights = tuple(weights)
        self._timeout_s, self._max_workers, self._memory_mb = timeout_s, workers, memory_mb
        check_functions(self._functions, self._weights)
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._selector = selectors.DefaultSelector()
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-starter")
        try:
            self._spawn()
            while any(worker.unanswered for worker in self._workers):
                self._turn(_Batch.of([]))
        except BaseException:
            self.close()
            raise

    def score(self, problem: Problem, texts: Sequence[str]) -> list[Score]:
        """One score for each text, in order."""
        return self.score_all([(problem, text) for text in texts])

    def score_all(self, items: Sequence[tuple[Problem, str]]) -> list[Score]:
        """One score for each (problem, text), in order; the items are spread over the workers."""
        batch = _Batch.of(items)
        try:
            self._staff(min(self._max_workers, len(items)))
            while batch.left:
                for worker in self._workers:
                    self._feed(worker, batch)
                if batch.left:
                    self._turn(batch)
        except BaseException:  # Ctrl-C too: a later call must not meet the answers of this one
            self._stop_all()
            raise
        return [score for score in batch.scores if score is not None]

    def close(self) -> None:
        """Kill the workers and give everything back; a second call does nothing."""
        self._stop_all()
        self._selector.close()
        self._starter.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------ processes

    def _staff(self, count: int) -> None:
        """At least count workers; those that died between calls are replaced, and no item is blamed for it."""
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            self._stop(worker)
        while len(self._workers) < count:
            self._spawn()

    def _spawn(self) -> None:
        what = json.dumps(self._functions), json.dumps(self._weights)
        process = self._starter.submit(_popen, *what, str(self._memory_mb), str(os.getpid())).result()
        worker = _Worker(process, time.monotonic() + START_S)
        os.set_blocking(worker.stdin, False)
        os.set_blocking(worker.stdout, False)
        self._selector.register(worker.stdout, selectors.EVENT_READ, worker)
        self._workers.append(worker)

    def _stop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        with suppress(ProcessLookupError, PermissionError):  # it is gone; macOS says it is not permitted
            os.killpg(worker.process.pid, signal.SIGKILL)
        for pipe in (worker.stdin, worker.stdout):
            with suppress(KeyError):  # stdin is registered only while there is something to write
                self._selector.unregister(pipe)
        with worker.process:  # closes the pipes and waits
            pass

    def _stop_all(self) -> None:
        for worker in list(self._workers):
            self._stop(worker)

    def _replace(self, worker: _Worker, batch: _Batch) -> None:
        """Kill it, put what it has not answered back in front, and start another, which nobody waits for yet."""
        self._stop(worker)
        batch.todo.extendleft(index for index in reversed(worker.unanswered) if index != HELLO)
        self._spawn()

    def _blame(self, worker: _Worker, batch: _Batch, kind: str, error: str) -> None:
        """The item in flight pays for its worker; the ones behind it go to another. An idle worker has none."""
        if worker.unanswered:
            index = worker.unanswered.popleft()
            if index != HELLO:
                plain = len(self._functions) == 1 and not self._weights
                self._fail(batch, index, kind, error if plain else f"{part_name(self._functions[worker.at])}: {error}")
            else:
                self._failed_starts += 1
                if self._failed_starts == MAX_FAILED_STARTS or kind == "timeout":
                    raise _cannot_load(self._functions[worker.at], f"while it was being loaded: {error}", "")
        self._replace(worker, batch)

    def _died(self, worker: _Worker, batch: _Batch) -> None:
        with suppress(subprocess.TimeoutExpired):  # it may have closed its pipe and live on
            worker.process.wait(1.0)
        match worker.process.returncode:
            case None:
                how = "it closed its pipe"
            case code:
                how = f"signal {-code}" if code < 0 else f"exit {code}"
        self._blame(worker, batch, "died", f"worker died: {how}")

    def _expire(self, batch: _Batch) -> None:
        """Find the workers that are late or gone; whatever they wrote before counts."""
        for worker in list(self._workers):
            gone = worker.process.poll() is not None
            if gone or worker.late():
                while worker in self._workers and self._read(worker, batch):
                    pass
            if worker not in self._workers:
                continue
            if gone:  # and its pipe is open: a process that it started holds it
                self._died(worker, batch)
            elif worker.late():
                limit = START_S if worker.unanswered[0] == HELLO else self._timeout_s
                self._blame(worker, batch, "timeout", f"timeout after {limit} s")

    # ------------------------------------------------------------ messages

    def _feed(self, worker: _Worker, batch: _Batch) -> None:
        """Send the worker its share of what is left, the smaller the nearer the end, and at most WINDOW ahead."""
        share = max(1, min(WINDOW, len(batch.todo) // (2 * len(self._workers))))
        while batch.todo and len(worker.unanswered) < share:
            index = batch.todo.popleft()
            try:
                worker.outgoing += _encode(index, *batch.items[index])
            except (TypeError, ValueError, RecursionError) as error:
                self._fail(batch, index, "exception", f"the problem cannot be sent as JSON: {error}")
                continue
            if not worker.unanswered:
                worker.deadline = time.monotonic() + self._timeout_s
            worker.unanswered.append(index)
        if worker.outgoing:
            self._write(worker)

    def _turn(self, batch: _Batch) -> None:
        """Wait for something to happen, and handle it."""
        nearest = min((worker.deadline for worker in self._workers if worker.unanswered), default=math.inf)
        for key, events in self._selector.select(min(max(0.0, nearest - time.monotonic()), POLL_S)):
            if key.data in self._workers and events & selectors.EVENT_READ:
                self._read(key.data, batch)
            if key.data in self._workers and events & selectors.EVENT_WRITE:
                self._write(key.data)
        self._expire(batch)

    def _write(self, worker: _Worker) -> None:
        with suppress(BlockingIOError, BrokenPipeError):  # a broken pipe also shows as the end of its stdout
            del worker.outgoing[: os.write(worker.stdin, worker.outgoing)]
        if not worker.outgoing:
            with suppress(KeyError):
                self._selector.unregister(worker.stdin)
        elif worker.stdin not in self._selector.get_map():
            self._selector.register(worker.stdin, selectors.EVENT_WRITE, worker)

    def _read(self, worker: _Worker, batch: _Batch) -> bool:
        """Take what the worker wrote; false if there was nothing to take."""
        try:
            data = os.read(worker.stdout, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._died(worker, batch)
            return False
        *lines, rest = (bytes(worker.incoming) + data).split(b"\n")
        worker.incoming = bytearray(rest)
        for line in lines:
            if worker in self._workers:
                self._settle(worker, line, batch)
        if len(rest) > LINE_BYTES and worker in self._workers:
            self._blame(worker, batch, "died", NOT_AN_ANSWER)
        return True

    def _settle(self, worker: _Worker, line: bytes, batch: _Batch) -> None:
        """Take one message of a worker."""
        message = _decode(line)
        if not worker.unanswered or message.get("id") != worker.unanswered[0]:
            self._blame(worker, batch, "died", NOT_AN_ANSWER)
        elif message.get("at") == worker.at + 1 < len(self._functions):
            worker.at += 1
        elif message["id"] == HELLO:
            if "failed" in message:
                raise _cannot_load(self._functions[worker.at], str(message["failed"]), str(message["where"]))
            self._failed_starts = 0
            worker.next_item(self._timeout_s)
        elif "loading" in message and worker.loading_notes:
            worker.deadline = time.monotonic() + (LOADING_S if message["loading"] is True else self._timeout_s)
            worker.loading_notes -= 1
        else:
            self._take(worker, message, batch)

    def _take(self, worker: _Worker, message: dict[str, Any], batch: _Batch) -> None:
        score, kind = _read_score(message)
        if score is None:
            self._blame(worker, batch, "died", NOT_AN_ANSWER)
            return
        worker.next_item(self._timeout_s)
        batch.settle(message["id"], score)
        if kind:
            self.failures[kind] += 1
        if message["last"]:
            self._replace(worker, batch)

    def _fail(self, batch: _Batch, index: int, kind: str, error: str) -> None:
        self.failures[kind] += 1
        batch.settle(index, Score(reward=0.0, parts={}, error=error))


def _cannot_load(function: str, found: str, place: str) -> UserError:
    source = function.rpartition(":")[0] or "tandem.rewards.answer"
    return UserError(
        "the reward function cannot be loaded",
        where=f"reward.function = {function}" + (f" ({place})" if place else ""),
        found=found,
        expected="`answer`, `module:function` or `file.py:function`, called as score(problem, completion)",
        next=f"python {source}" if source.endswith(".py") else f'python -c "import {source}"',
    )


def _popen(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a worker process, in a session of its own so that what it starts is killed with it."""
    # One thread each, as the cores belong to engine and trainer; one hash seed, so that sympy orders terms alike.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-m", "tandem.rewards.worker", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **threads, "PYTHONHASHSEED": "0"},
        bufsize=0,
        start_new_session=True,
    )


def _encode(index: int, problem: Problem, text: str) -> bytes:
    """One request line. Raises TypeError, ValueError or RecursionError if the metadata is not JSON, or is huge."""
    plain = {name: getattr(problem, name) for name in ("uid", "messages", "answer", "category", "metadata")}
    request = {"id": index, "problem": plain, "text": text[-TEXT_CHARS:]}
    line = json.dumps(request, default=_plain).encode() + b"\n"
    if len(line) > PROBLEM_BYTES:
        raise ValueError(f"it has {len(line)} bytes, more than {PROBLEM_BYTES}")
    return line


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):  # as Parquet gives them
        return value.tolist()
    raise TypeError(f"found a {type(value).__name__} in it")


def _decode(line: bytes) -> dict[str, Any]:
    """A worker's message; empty if it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _read_score(message: dict[str, Any]) -> tuple[Score | None, str]:
    """(score, kind of failure) of an answer, and (None, "") if it is none: hostile code may have written it."""
    match message:
        case {"reward": float(reward), "parts": dict(parts), "error": str(error), "kind": str(kind), "last": bool()}:
            finite = all(isinstance(value, float) and math.isfinite(value) for value in (reward, *parts.values()))
            if finite and kind in ("", "exception", "bad_value"):
                return Score(reward=reward, parts=parts, error=error), kind
    return None, ""
