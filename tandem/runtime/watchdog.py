"""Who waits for whom, process-wide as logging is: a run that gets nothing done says who is to
blame, and stops.

    any thread                        the thread "watchdog"                     runtime/watchdog_process.py, a process
    ----------                        ---------------------                     -------------------
    beat()            a time   ->     _look: about once a second
    with waits(...):  a wait   ->     a stalled actor? follow its waits         "still there" <- each look
                                      to the culprit; _report, kill what        it could not look for deadline_s:
                                      was started, exit 3                       one call in C keeps the interpreter

An *actor* is a thread that has beaten or waited; the main thread is called "trainer", others by
their thread's name. It is stalled when neither a beat nor the beginning or end of a wait of its own
is younger than deadline_s. From it the chain of waits leads to the culprit: an actor that waits for
nobody, a thread that has ended, something outside this process, or, in a circle, a deadlock. If it
leads to an actor that is not stalled, nobody is to blame yet. An actor that goes on and on without
ever giving what others wait for is not found.

Time in which the watchdog could not look (the process was stopped, the lid was closed) counts for
nobody.

It knows neither what the waits are for nor whether a lock is behind one; it believes what it is
told. Waits of coroutines are not its business: their thread is the actor.
"""

import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TextIO

from tandem.runtime.processes import (
    ENDED,
    NEXT,
    STOPPED,
    catches,
    descendants,
    end_descendants,
    is_ours,
    tell,
)

EXIT_CODE = 3
LOOK_S = 1.0  # at most, between two looks
REPORT_S = 10.0  # for the report, which reads files and may hang like the rest
STACKS_S = 1.0  # for other processes to write their stacks
NAME = "watchdog"
TRAINER = "trainer"

Stop = Callable[[str], None]  # is told the report


def beat() -> None:
    """This thread got something done. It takes less than a microsecond."""
    if _watchdog is not None:
        _watchdog.actor().alive = time.monotonic()


@contextmanager
def waits(*, of: str, what: str) -> Iterator[None]:
    """This thread waits for the actor `of`, or for something outside of that name: "reward
    workers", "disk".

    Example: with waits(of="rollouts", what="the episodes of step 7"): episodes = future.result()
    """
    if _watchdog is None:
        yield
        return
    actor, wait = (
        _watchdog.actor(),
        _Wait(of=of, what=what, thread=_thread_named(of), since=time.monotonic()),
    )
    actor.alive = wait.since
    actor.waits.append(wait)
    try:
        yield
    finally:
        actor.waits.remove(wait)
        actor.alive = time.monotonic()


def dumps_stacks(file: TextIO | int = 2) -> None:
    """Called by a process that a run starts: SIGUSR1 has it write the stacks of its threads,
    wherever they hang."""
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


@contextmanager
def watching(
    deadline_s: float, *, log: Path | None = None, stop: Stop | None = None
) -> Iterator[None]:
    """Watch this process while the context lasts; the calling thread is the first actor.

    On a stall the report goes to stderr and to the end of log, and the process ends with EXIT_CODE,
    what it started first. stop: what to do instead of ending.
    """
    global _watchdog
    watchdog = _Watchdog(deadline_s, log, stop or _end_process)
    assert _watchdog is None, "one watchdog a process"
    with _guarded(deadline_s, log) as guard:
        watchdog.guard = guard
        thread = threading.Thread(target=watchdog.run, name=NAME, daemon=True)
        _watchdog = watchdog
        watchdog.begin()
        thread.start()
        try:
            yield
        finally:
            _watchdog = None
            watchdog.over.set()
            thread.join()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Wait:
    of: str
    what: str
    thread: threading.Thread | None  # of that name, when the wait began
    since: float


@dataclass(slots=True, eq=False)
class _Actor:
    thread: threading.Thread
    alive: float  # monotonic seconds of its last sign of life
    waits: list[_Wait] = field(default_factory=list)  # the innermost last

    @property
    def name(self) -> str:
        return TRAINER if self.thread is threading.main_thread() else self.thread.name


class _Watchdog:
    """guard: the process that watches this one; over: set when there is nothing more to watch."""

    def __init__(self, deadline_s: float, log: Path | None, stop: Stop):
        self.over = threading.Event()
        self.guard: _Guard | None = None
        self._deadline_s, self._log, self._stop = deadline_s, log, stop
        self._look_s = min(LOOK_S, deadline_s / 4)
        # list(values()) is one operation, so there is no lock
        self._actors: dict[threading.Thread, _Actor] = {}

    def actor(self) -> _Actor:
        """The calling thread's."""
        thread = threading.current_thread()
        actor = self._actors.get(thread)
        if actor is None:
            actor = self._actors[thread] = _Actor(thread, time.monotonic())
        return actor

    def begin(self) -> None:
        """In the thread that asks for it: the first actor."""
        self.actor()
        self._reassure()

    def run(self) -> None:
        last, accused = time.monotonic(), False
        while not self.over.wait(self._look_s):
            now = time.monotonic()
            self._forgive(now - last - 2 * self._look_s, now)
            last = now
            self._reassure()
            if not accused and (accusation := self._look(now)):
                accused = True
                self._accuse(accusation)

    def _reassure(self) -> None:
        if self.guard is not None:
            self.guard.say_that_all_is_well(self._actors)

    def _accuse(self, accusation: str) -> None:
        """Report and stop, even if reporting hangs; the guard hears from us meanwhile."""
        told: list[str] = []
        thread = threading.Thread(
            target=lambda: told.append(self._report(accusation)), name=NAME, daemon=True
        )
        thread.start()
        until = time.monotonic() + REPORT_S
        while thread.is_alive() and time.monotonic() < until:
            thread.join(self._look_s)
            self._reassure()
        self._stop(told[0] if told else accusation)

    def _forgive(self, missed: float, now: float) -> None:
        """Seconds in which nobody looked are taken back; a sign of life that came since stays."""
        if missed > 0:
            for actor in list(self._actors.values()):
                actor.alive = min(now, actor.alive + missed)

    def _look(self, now: float) -> str:
        """The accusation, or nothing. Threads that have ended are forgotten where nobody waits for
        them."""
        actors = list(self._actors.values())
        wanted = {wait.of for actor in actors for wait in actor.waits}
        for actor in actors:
            if not actor.thread.is_alive() and actor.name not in wanted:
                self._actors.pop(actor.thread, None)
            elif (
                actor.thread.is_alive()
                and self._stalled(actor, now)
                and (chain := self._chain(actor, now))
            ):
                return f"stalled for {now - actor.alive:.0f} s: {chain}"
        return ""

    def _stalled(self, actor: _Actor, now: float) -> bool:
        return now - actor.alive > self._deadline_s

    # ---- the culprit

    def _chain(self, first: _Actor, now: float) -> str:
        """From a stalled actor to the one to blame; empty if that one is not stalled."""
        text, chain = f"`{first.name}`", [first]
        while True:
            last = chain[-1]
            which = ", which " if len(chain) > 1 else " "
            if not (waits := last.waits[:]):
                return f"{text}{which}shows no sign of life, at {_place(last.thread)}"
            wait = waits[-1]
            text += f"{which}waits for `{wait.of}` ({wait.what})"
            follower = self._named(wait.of, now)
            if follower is None:
                return text + _outside(wait, None if self.guard is None else self.guard.process.pid)
            if not follower.thread.is_alive():
                return f"{text}, whose thread has ended"
            if not self._stalled(follower, now):
                return ""
            if follower in chain:
                circle = chain[chain.index(follower) :]
                return (
                    f"{text}: a deadlock of {' and '.join(f'`{actor.name}`' for actor in circle)}"
                )
            chain.append(follower)

    def _named(self, name: str, now: float) -> _Actor | None:
        """Of several actors of that name the liveliest."""
        actors = [actor for actor in list(self._actors.values()) if actor.name == name]
        return max(actors, key=lambda actor: (actor.thread.is_alive(), actor.alive), default=None)

    # ---- the report

    def _report(self, accusation: str) -> str:
        """Told as it is made, the culprit first: what comes later may itself hang."""
        head = f"{accusation}\n{NEXT}"
        tell(head, self._log)
        details = self._details()
        tell(details, self._log)
        giving = [
            process.pid
            for process in descendants(os.getpid())
            if catches(process.pid, signal.SIGUSR1)
        ]
        for pid in giving:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        if giving:
            time.sleep(STACKS_S)
        return head + details

    def _details(self) -> str:
        now, guard = time.monotonic(), [] if self.guard is None else [self.guard.process.pid]
        rows = ["who waits for whom:"]
        for actor in list(self._actors.values()):
            rows += [
                f"  `{actor.name}`: last sign of life {now - actor.alive:.1f} s ago, at {_place(actor.thread)}"
            ]
            rows += [
                f"    waits for `{w.of}` ({w.what}) since {now - w.since:.1f} s"
                for w in actor.waits[:]
            ]
        rows += ["threads of this process:"]
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if thread.ident in frames and thread.name != NAME:
                rows += [
                    f"  {thread.name}:",
                    "".join(traceback.format_stack(frames[thread.ident])).rstrip(),
                ]
        rows += [
            "processes that it started (stacks of those that give them are in their own stderr or log):"
        ]
        rows += [p.describe() for p in descendants(os.getpid(), guard)] or ["  none"]
        return "\n".join(rows) + "\n"


def _outside(wait: _Wait, guard: int | None) -> str:
    """How the accusation of one that is no actor ends."""
    thread = wait.thread or _thread_named(wait.of)
    if thread is not None:
        return (
            f", which is at {_place(thread)}" if thread.is_alive() else ", whose thread has ended"
        )
    idle = [
        p for p in descendants(os.getpid(), [guard] if guard else []) if p.state in STOPPED + ENDED
    ]
    what = [
        f"; process {p.pid} ({p.command[:60] or 'no command'}) is {p.position}" for p in idle[:3]
    ]
    return ", outside of the threads here" + "".join(what)


def _thread_named(name: str) -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if thread.name == name), None)


def _place(thread: threading.Thread) -> str:
    """The innermost line that is not the standard library's."""
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if is_ours(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_name}"
        frame = frame.f_back
    return "no line of its own"


def _end_process(report: str) -> None:
    """Whatever the main thread hangs in. What was told is told."""
    end_descendants(os.getpid())
    os._exit(EXIT_CODE)


# ---------------------------------------------------------------- the guard


@dataclass(frozen=True, slots=True, eq=False)
class _Guard:
    process: subprocess.Popen[bytes]
    pipe: int  # our end; never waits

    def say_that_all_is_well(self, actors: dict[threading.Thread, _Actor]) -> None:
        """With the actors by their thread's number, as faulthandler writes it."""
        names = {
            f"0x{a.thread.ident:016x}": [a.name, a.thread.native_id] for a in list(actors.values())
        }
        with suppress(OSError):  # it has been killed; then we watch alone
            os.write(self.pipe, json.dumps(names).encode() + b"\n")


@contextmanager
def _guarded(deadline_s: float, log: Path | None) -> Iterator[_Guard]:
    """SIGUSR1 has this process write its stacks to the guard, even while no Python can run, and
    SIGQUIT ends it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    place = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.append({place!r}); from tandem.runtime.watchdog_process import main; main()"
    start = [sys.executable, "-S", "-P", "-c", code, str(deadline_s), str(log or "")]
    process = subprocess.Popen(
        start, stdin=reading, stdout=subprocess.DEVNULL, start_new_session=True
    )
    os.close(reading)
    faulthandler.register(signal.SIGUSR1, file=writing, all_threads=True)
    with _exit_code_of_sigquit():
        try:
            yield _Guard(process, writing)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            os.close(writing)
            process.kill()
            process.wait()


@contextmanager
def _exit_code_of_sigquit() -> Iterator[None]:
    """SIGQUIT has the number 3, so the C library's `_exit` as its handler gives EXIT_CODE without
    the interpreter."""
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    before = libc.signal(signal.SIGQUIT, ctypes.cast(libc._exit, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGQUIT, before)


_watchdog: _Watchdog | None = None
