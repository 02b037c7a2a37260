"""The watchdog's watchdog: a process that ends a run in which no Python can run any more.

A call in C that keeps the interpreter to itself (a regular expression that backtracks for ever, a
driver that hangs) stops the watchdog's thread as well. So that thread says about once a second that
all is well, and this process, which watchdog.watching starts, does its work when it does not:

    watchdog's thread  -- {"0x00007f..": ["trainer", 4711]} -->  silent = 0
    faulthandler       -- the stacks, after SIGUSR1 --------->  to stderr, or into the report
                       <-- SIGUSR1, SIGQUIT, SIGKILL --------   silent for deadline_s

It ends with the run, whose end of the pipe closes. A run that was stopped (SIGSTOP, a debugger) is
forgiven.
"""

import json
import os
import re
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from tandem.runtime.processes import (
    NEXT,
    STOPPED,
    descendants,
    end_descendants,
    is_ours,
    state_of,
    tell,
)

POLL_S = 0.5
SLACK_S = 3.0  # beyond the deadline, which the watchdog's thread keeps itself where it can
STACKS_S, END_S = 1.0, 2.0

Names = dict[str, tuple[str, int]]  # of a thread by its number: actor, number for the kernel


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they are the run's to handle; it then ends us
        signal.signal(number, signal.SIG_IGN)
    deadline_s, log = sys.argv[1:]
    watch(float(deadline_s), Path(log) if log else None)


def watch(deadline_s: float, log: Path | None) -> None:
    """Until the run has ended, or was ended."""
    run, pipe, silent, last = os.getppid(), _Pipe(), 0.0, time.monotonic()
    names: Names = {}
    while os.getppid() == run and (lines := pipe.read(POLL_S)) is not None:
        now = time.monotonic()
        if (state_of(run) or "?") not in STOPPED:
            silent += min(now - last, 2 * POLL_S)  # not what was missed because we were stopped too
        last = now
        for line in lines:
            if line.startswith("{"):
                names, silent = json.loads(line), 0.0
            else:  # somebody has asked for the stacks
                os.write(2, line.encode())
        if silent > deadline_s + SLACK_S:
            silent = accuse(run, pipe, names, silent, log)


def accuse(run: int, pipe: "_Pipe", names: Names, silent: float, log: Path | None) -> float:
    """Tell who keeps the interpreter, and end the run with what it started. It is silent no more if
    it speaks after all."""
    running = [number for number, (_, thread) in names.items() if state_of(run, thread) == "R"]
    os.kill(run, signal.SIGUSR1)
    stacks, until = "", time.monotonic() + STACKS_S
    while time.monotonic() < until:
        stacks += "".join(pipe.read(POLL_S) or [])
    if "\n{" in f"\n{stacks}":
        return 0.0
    main = [number for number, (_, thread) in names.items() if thread == run]
    number = (running if len(running) == 1 else main or [""])[0]
    name = names[number][0] if number else "a thread"
    started = descendants(run, [os.getpid()])
    tell(
        f"stalled for {silent:.0f} s: `{name}` is in a call that lets no other thread run, at {_place(stacks, number)}\n{NEXT}"
        f"threads of the process:\n{stacks}"
        "processes that it started:\n"
        + ("".join(f"{process.describe()}\n" for process in started) or "  none\n"),
        log,
    )
    end_descendants(run, [os.getpid()])
    for last in (signal.SIGQUIT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(run, last)
        pipe.wait_for_end(END_S)
    return silent


def _place(stacks: str, number: str) -> str:
    """The innermost line that is not the standard library's, of the thread of that number."""
    _, _, stack = stacks.partition(number) if number else ("", "", stacks)
    for file, line, function in re.findall(
        r'File "(.+)", line (\d+) in (.+)', stack.partition("\n\n")[0]
    ):
        if is_ours(file):
            return f"{file}:{line}, {function}"
    return "a line that is not known"


class _Pipe:
    """Standard input, by whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self, seconds: float) -> list[str] | None:
        """The lines that have come within seconds; None where no more can come."""
        if not select.select([0], [], [], seconds)[0]:
            return []
        data = os.read(0, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") + "\n" for line in lines] if data else None

    def wait_for_end(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (
            time.monotonic() < until and self.read(max(0.0, until - time.monotonic())) is not None
        ):
            pass
