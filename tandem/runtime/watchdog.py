"""The watchdog: stops a run that gets nothing done, and says who waits for whom.

    any thread                 the thread "watchdog"              the process of watchdog_process.py
    ----------                 ---------------------              ----------------------------------
    heartbeat()     a time ->  _find_stall about once a second:
    waiting_for()   a wait ->  a stalled actor? follow its waits  "still here"  <- each look
                               to the culprit; report, kill what  missing for deadline_s: a call in
                               was started, exit 3                C that keeps the interpreter

An *actor* is a thread that has sent a heartbeat or waited: "trainer", the main thread, or another
by its thread's name. A thread that Python has not started counts as the trainer: autograd's, which
run a backward pass on a GPU. An actor has stalled when its last sign of life, a heartbeat or the
beginning or end of a wait, is older than deadline_s. From it the chain of waits leads to the
culprit: an actor that waits for nobody, a thread that has ended, something outside this process,
or, in a circle, a deadlock. A chain that leads to a live actor blames nobody yet. A livelock (an
actor that sends heartbeats and never delivers) is not detected.

Time in which the watchdog could not look (the process was stopped, the lid was closed) counts for
nobody.

It knows neither the reason of a wait nor the lock behind it; it believes its callers. It does not
see the waits of coroutines: their thread is the actor. One watchdog a process, as with logging.
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
from typing import TextIO

from tandem.runtime.processes import (
    STOPPED,
    ZOMBIE,
    Process,
    catches,
    descendants,
    kill_descendants,
    line_of_thread,
    write_report,
)
from tandem.runtime.watchdog_process import NEXT

EXIT_CODE = 3
LOOK_S = 1.0  # at most, between two looks
REPORT_S = 10.0  # for the report, which reads files and may hang like the rest
STACKS_S = 1.0  # for other processes to write their stacks
NAME = "watchdog"
TRAINER = "trainer"

OnStall = Callable[[str], None]  # gets the report


def heartbeat() -> None:
    """Record that this thread got something done. Takes less than a microsecond."""
    if _watchdog is not None:
        _watchdog.actor().last_sign = time.monotonic()


@contextmanager
def waiting_for(target: str, what: str) -> Iterator[None]:
    """Record that this thread waits.

    target: the name of an actor, or of something outside the threads here: "reward workers", "disk"
    what: the thing that the target is to give

    Example: with waiting_for("rollouts", "the episodes of step 7"): episodes = future.result()
    """
    if _watchdog is None:
        yield
        return
    actor, now = _watchdog.actor(), time.monotonic()
    wait = _Wait(target=target, what=what, thread=_thread_named(target), since=now)
    actor.last_sign = now
    actor.waits.append(wait)
    try:
        yield
    finally:
        actor.waits.remove(wait)
        actor.last_sign = time.monotonic()


def dump_stacks_on_signal(file: TextIO | int = 2) -> None:
    """Let SIGUSR1 write the stacks of this process's threads, even if they hang.

    For processes that a run starts; the watchdog sends the signal.
    """
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


@contextmanager
def watching(
    deadline_s: float, *, log: Path | None = None, on_stall: OnStall | None = None
) -> Iterator[None]:
    """Watch this process while the context lasts; the calling thread is the first actor.

    On a stall the report goes to stderr and to the end of log; then all started processes are
    killed and this one ends with EXIT_CODE. on_stall: called instead of killing and ending.
    """
    global _watchdog
    watchdog = _Watchdog(deadline_s, log, on_stall or _exit_process)
    assert _watchdog is None, "one watchdog a process"
    with _second_process(deadline_s, log) as watchdog.second:
        thread = threading.Thread(target=watchdog.run, name=NAME, daemon=True)
        _watchdog = watchdog
        watchdog.actor()
        watchdog.say_still_here()
        thread.start()
        try:
            yield
        finally:
            _watchdog = None
            watchdog.over.set()
            thread.join()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Wait:
    target: str
    what: str
    thread: threading.Thread | None  # of that name, when the wait began
    since: float


@dataclass(slots=True, eq=False)
class _Actor:
    thread: threading.Thread
    last_sign: float  # of life, in monotonic seconds
    waits: list[_Wait] = field(default_factory=list)  # the innermost last

    @property
    def name(self) -> str:
        return TRAINER if self.thread is threading.main_thread() else self.thread.name


class _Watchdog:
    """The actors of this process and the thread that looks at them.

    second: the process watching this one; over: set when there is nothing more to watch.
    """

    def __init__(self, deadline_s: float, log: Path | None, on_stall: OnStall):
        self.over = threading.Event()
        self.second: _SecondProcess | None = None
        self._deadline_s, self._log, self._on_stall = deadline_s, log, on_stall
        self._look_s = min(LOOK_S, deadline_s / 4)
        # list(values()) is one operation, so there is no lock
        self._actors: dict[threading.Thread, _Actor] = {}

    def actor(self) -> _Actor:
        """Return the actor of the calling thread, a new one at first."""
        thread = threading.current_thread()
        if isinstance(thread, threading._DummyThread):  # it would never end
            thread = threading.main_thread()
        actor = self._actors.get(thread)
        if actor is None:
            actor = self._actors[thread] = _Actor(thread, time.monotonic())
        return actor

    def run(self) -> None:
        last_look, reported = time.monotonic(), False
        while not self.over.wait(self._look_s):
            now = time.monotonic()
            self._forgive(now - last_look - 2 * self._look_s, now)
            last_look = now
            self.say_still_here()
            if not reported and (finding := self._find_stall(now)):
                reported = True
                self._report_and_stop(finding)

    def say_still_here(self) -> None:
        if self.second is not None:
            self.second.say_still_here(list(self._actors.values()))

    def _forgive(self, missed_s: float, now: float) -> None:
        """Take back the seconds in which nobody looked; a later sign of life stays."""
        if missed_s > 0:
            for actor in list(self._actors.values()):
                actor.last_sign = min(now, actor.last_sign + missed_s)

    def _find_stall(self, now: float) -> str:
        """Say who stalled and who is to blame, or "". Forgets ended threads nobody waits for."""
        actors = list(self._actors.values())
        targets = {wait.target for actor in actors for wait in actor.waits}
        for actor in actors:
            alive = actor.thread.is_alive()
            if not alive and actor.name not in targets:
                self._actors.pop(actor.thread, None)
            elif alive and self._has_stalled(actor, now) and (chain := self._blame(actor, now)):
                return f"stalled for {now - actor.last_sign:.0f} s: {chain}"
        return ""

    def _has_stalled(self, actor: _Actor, now: float) -> bool:
        return now - actor.last_sign > self._deadline_s

    # ---- the culprit

    def _blame(self, first: _Actor, now: float) -> str:
        """Follow the waits of a stalled actor to the culprit; "" if the culprit has not stalled."""
        text, chain = f"`{first.name}`", [first]
        while True:
            last = chain[-1]
            which = ", which " if len(chain) > 1 else " "
            if not (waits := last.waits[:]):
                return f"{text}{which}shows no sign of life, at {_line_of(last.thread)}"
            wait = waits[-1]
            text += f"{which}waits for `{wait.target}` ({wait.what})"
            target = self._actor_named(wait.target)
            if target is None:
                return text + self._outside(wait)
            if not target.thread.is_alive():
                return f"{text}, whose thread has ended"
            if not self._has_stalled(target, now):
                return ""
            if target in chain:
                names = [f"`{actor.name}`" for actor in chain[chain.index(target) :]]
                return f"{text}: a deadlock of {' and '.join(names)}"
            chain.append(target)

    def _actor_named(self, name: str) -> _Actor | None:
        """Return the actor of that name, of several the liveliest; None without one."""
        actors = [actor for actor in list(self._actors.values()) if actor.name == name]
        return max(actors, key=lambda a: (a.thread.is_alive(), a.last_sign), default=None)

    def _outside(self, wait: _Wait) -> str:
        """Describe a target outside the actors."""
        thread = wait.thread or _thread_named(wait.target)
        if thread is not None and thread.is_alive():
            return f", which is at {_line_of(thread)}"
        if thread is not None:
            return ", whose thread has ended"
        idle = [p for p in self._started_processes() if p.state in STOPPED + ZOMBIE]
        commands = [(p, p.command[:60] or "no command") for p in idle[:3]]
        return ", outside of the threads here" + "".join(
            f"; process {process.pid} ({command}) is {process.activity}"
            for process, command in commands
        )

    # ---- the report

    def _report_and_stop(self, finding: str) -> None:
        """Report and stop, even if the report hangs; the second process hears from us meanwhile."""
        reports: list[str] = []
        thread = threading.Thread(
            target=lambda: reports.append(self._report(finding)), name=NAME, daemon=True
        )
        thread.start()
        until = time.monotonic() + REPORT_S
        while thread.is_alive() and time.monotonic() < until:
            thread.join(self._look_s)
            self.say_still_here()
        self._on_stall(reports[0] if reports else finding)

    def _report(self, finding: str) -> str:
        """Write the report part by part, the culprit first, because a later part may hang."""
        head = f"{finding}\n{NEXT}"
        write_report(head, self._log)
        details = self._details()
        write_report(details, self._log)
        asked = [p.pid for p in descendants(os.getpid()) if catches(p.pid, signal.SIGUSR1)]
        for pid in asked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        if asked:
            time.sleep(STACKS_S)
        return head + details

    def _details(self) -> str:
        now, rows = time.monotonic(), ["who waits for whom:"]
        for actor in list(self._actors.values()):
            silent_s = now - actor.last_sign
            line = _line_of(actor.thread)
            rows += [f"  `{actor.name}`: last sign of life {silent_s:.1f} s ago, at {line}"]
            rows += [
                f"    waits for `{wait.target}` ({wait.what}) since {now - wait.since:.1f} s"
                for wait in actor.waits[:]
            ]
        rows += ["threads of this process:"]
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if thread.ident in frames and thread.name != NAME:
                stack = "".join(traceback.format_stack(frames[thread.ident])).rstrip()
                rows += [f"  {thread.name}:", stack]
        rows += [
            "processes that it started"
            " (stacks of those that give them are in their own stderr or log):"
        ]
        rows += [process.describe() for process in self._started_processes()] or ["  none"]
        return "\n".join(rows) + "\n"

    def _started_processes(self) -> list[Process]:
        return descendants(os.getpid(), [] if self.second is None else [self.second.process.pid])


def _thread_named(name: str) -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if thread.name == name), None)


def _line_of(thread: threading.Thread) -> str:
    return line_of_thread(thread) or "no line of its own"


def _exit_process(report: str) -> None:
    """End all processes, even if the main thread hangs; the report is written already."""
    kill_descendants(os.getpid())
    os._exit(EXIT_CODE)


# ---------------------------------------------------------------- the second process


@dataclass(frozen=True, slots=True, eq=False)
class _SecondProcess:
    process: subprocess.Popen[bytes]
    pipe: int  # our end; never waits

    def say_still_here(self, actors: list[_Actor]) -> None:
        """Send the actors by their thread's number as faulthandler writes it."""
        names = {f"0x{a.thread.ident:016x}": [a.name, a.thread.native_id] for a in actors}
        with suppress(OSError):  # it has been killed; then we watch alone
            os.write(self.pipe, json.dumps(names).encode() + b"\n")


@contextmanager
def _second_process(deadline_s: float, log: Path | None) -> Iterator[_SecondProcess]:
    """Start watchdog_process.py.

    SIGUSR1 lets this process write its stacks to it, even while no Python can run; SIGQUIT ends
    this process.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    root = str(Path(__file__).parents[2])
    code = (
        f"import sys; sys.path.append({root!r}); "
        "from tandem.runtime.watchdog_process import main; main()"
    )
    command = [sys.executable, "-S", "-P", "-c", code, str(deadline_s), str(log or "")]
    process = subprocess.Popen(
        command, stdin=reading, stdout=subprocess.DEVNULL, start_new_session=True
    )
    os.close(reading)
    faulthandler.register(signal.SIGUSR1, file=writing, all_threads=True)
    with _exit_code_of_sigquit():
        try:
            yield _SecondProcess(process, writing)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            os.close(writing)
            process.kill()
            process.wait()


@contextmanager
def _exit_code_of_sigquit() -> Iterator[None]:
    """Let SIGQUIT end this process with EXIT_CODE, without the interpreter.

    SIGQUIT has the number 3, which the C library's `_exit` gets as its handler.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    before = libc.signal(signal.SIGQUIT, ctypes.cast(libc._exit, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGQUIT, before)


_watchdog: _Watchdog | None = None
