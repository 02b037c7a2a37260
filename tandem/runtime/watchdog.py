"""The watchdog: stops a run that gets nothing done, and says who waits for whom.

    any thread                 the thread "watchdog"              faulthandler's timer
    ----------                 ---------------------              --------------------
    heartbeat()     a time ->  _find_stall about once a second:
    waiting_for()   a wait ->  a stalled actor? follow its waits  set by each look; it ends a
                               to the culprit; report, kill what  process in which no Python
                               was started, exit 3                runs: stacks, exit 1

An *actor* is a thread that has sent a heartbeat or waited: "trainer", the main thread, or another
by its thread's name. A thread that Python has not started counts as the trainer: autograd's, which
run a backward pass on a GPU. An actor has stalled when its last sign of life, a heartbeat or the
beginning or end of a wait, is older than deadline_s. From it the chain of waits leads to the
culprit: an actor that waits for nobody, a thread that has ended, something outside this process,
or, in a circle, a deadlock. A chain that leads to a live actor blames nobody yet. A livelock (an
actor that sends heartbeats and never delivers) is not detected.

Time in which the watchdog could not look (the lid was closed) counts for nobody; but the timer ends
a process that was stopped (SIGSTOP, a debugger) for longer than its deadline.

It knows neither the reason of a wait nor the lock behind it; it believes its callers. It does not
see the waits of coroutines: their thread is the actor. One watchdog a process, as with logging.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tandem.runtime.processes import (
    STOPPED,
    ZOMBIE,
    catches,
    descendants,
    kill_descendants,
    line_of_thread,
    write_report,
)

# in each report
NEXT = "next: the same command resumes from the last checkpoint; run.stall_s is the deadline\n"
EXIT_CODE = 3
SLACK_S = 3.0  # of the timer beyond the deadline, which this thread keeps itself where it can
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
    thread = threading.Thread(target=watchdog.run, name=NAME, daemon=True)
    _watchdog = watchdog
    watchdog.actor()
    watchdog.say_still_here()
    # the watchdog of a process that has started this one sends it, for the stacks of all threads
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    thread.start()
    try:
        yield
    finally:
        _watchdog = None
        watchdog.over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGUSR1)


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
    """The actors of this process and the thread that looks at them, until `over`."""

    def __init__(self, deadline_s: float, log: Path | None, on_stall: OnStall):
        self.over = threading.Event()
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
            # seconds in which nobody looked are taken back; a later sign of life stays
            if (missed_s := now - last_look - 2 * self._look_s) > 0:
                for actor in list(self._actors.values()):
                    actor.last_sign = min(now, actor.last_sign + missed_s)
            last_look = now
            self.say_still_here()
            if not reported and (finding := self._find_stall(now)):
                reported = True
                faulthandler.dump_traceback_later(REPORT_S, exit=True, file=2)
                report = self._report(finding)
                self.say_still_here()
                self._on_stall(report)

    def say_still_here(self) -> None:
        faulthandler.dump_traceback_later(self._deadline_s + SLACK_S, exit=True, file=2)

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
            named = [actor for actor in list(self._actors.values()) if actor.name == wait.target]
            # of several the liveliest
            target = max(named, key=lambda a: (a.thread.is_alive(), a.last_sign), default=None)
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

    def _outside(self, wait: _Wait) -> str:
        """Describe a target outside the actors."""
        thread = wait.thread or _thread_named(wait.target)
        if thread is not None and thread.is_alive():
            return f", which is at {_line_of(thread)}"
        if thread is not None:
            return ", whose thread has ended"
        idle = [p for p in descendants(os.getpid()) if p.state in STOPPED + ZOMBIE]
        return ", outside of the threads here" + "".join(
            f"; process {p.pid} ({p.command[:60] or 'no command'}) is {p.activity}"
            for p in idle[:3]
        )

    # ---- the report

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
        rows += [process.describe() for process in descendants(os.getpid())] or ["  none"]
        return "\n".join(rows) + "\n"


def _thread_named(name: str) -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if thread.name == name), None)


def _line_of(thread: threading.Thread) -> str:
    return line_of_thread(thread) or "no line of its own"


def _exit_process(report: str) -> None:
    """End all processes, even if the main thread hangs; the report is written already."""
    kill_descendants(os.getpid())
    os._exit(EXIT_CODE)


_watchdog: _Watchdog | None = None
