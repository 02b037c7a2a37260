"""The watchdog's watchdog: a process that ends a run in which no Python can run any more.

A call in C that keeps the interpreter to itself (a regular expression that backtracks for ever, a
driver that hangs) stops the watchdog's thread as well. So that thread says about once a second that
it is still here, and this process, which watchdog.watching starts, takes over when it does not:

    watchdog's thread  -- {"0x00007f..": ["trainer", 4711]} -->  silent_s = 0
    faulthandler       -- the stacks, after SIGUSR1 --------->  to stderr, or into the report
                       <-- SIGUSR1, SIGQUIT, SIGKILL --------   silent for deadline_s

`faulthandler.dump_traceback_later(exit=True)` would end such a run too, but with exit code 1,
without a word on which of the threads keeps the interpreter, with the started processes left
behind, and also when the run was only stopped for a while (SIGSTOP, a debugger).

It ends with the run, as the pipe then closes.
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
    STOPPED,
    descendants,
    innermost_line,
    kill_descendants,
    state_of,
    write_report,
)

# in each report, the watchdog's own as well
NEXT = "next: the same command resumes from the last checkpoint; run.stall_s is the deadline\n"
POLL_S = 0.5
SLACK_S = 3.0  # beyond the deadline, which the watchdog's thread keeps itself where it can
STACKS_S, END_S = 1.0, 2.0

# of a thread by its number as faulthandler writes it: the actor, and the number for the kernel
Names = dict[str, tuple[str, int]]


def main() -> None:
    """Run as `watchdog_process DEADLINE_S LOG`; an empty LOG is none."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are the run's to handle; it then ends us
        signal.signal(number, signal.SIG_IGN)
    deadline_s, log = sys.argv[1:]
    watch_parent(float(deadline_s), Path(log) if log else None)


def watch_parent(deadline_s: float, log: Path | None) -> None:
    """Watch the parent process until it has ended, and end it if it is silent for too long."""
    run, pipe, silent_s, last = os.getppid(), _Pipe(), 0.0, time.monotonic()
    names: Names = {}
    while os.getppid() == run and (lines := pipe.read(POLL_S)) is not None:
        now = time.monotonic()
        if (state_of(run) or "?") not in STOPPED:
            # at most two polls, because this process may have been stopped too
            silent_s += min(now - last, 2 * POLL_S)
        last = now
        for line in lines:
            if line.startswith("{"):
                names, silent_s = json.loads(line), 0.0
            else:  # somebody has asked for the stacks
                os.write(2, line.encode())
        if silent_s > deadline_s + SLACK_S:
            silent_s = report_and_end(run, pipe, names, silent_s, log)


def report_and_end(
    run: int, pipe: "_Pipe", names: Names, silent_s: float, log: Path | None
) -> float:
    """Report which thread keeps the interpreter, and end the run and all that it started.

    Returns the seconds of silence: 0 if the run speaks after all and is left alone.
    """
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
    started = [process.describe() for process in descendants(run, [os.getpid()])] or ["  none"]
    write_report(
        f"stalled for {silent_s:.0f} s: `{name}` is in a call that lets no other thread run, "
        f"at {_line_of(stacks, number)}\n{NEXT}"
        f"threads of the process:\n{stacks}"
        "processes that it started:\n" + "".join(f"{line}\n" for line in started),
        log,
    )
    kill_descendants(run, [os.getpid()])
    for last in (signal.SIGQUIT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(run, last)
        pipe.wait_for_end(END_S)
    return silent_s


def _line_of(stacks: str, number: str) -> str:
    """Find the innermost line of the thread with this number; of the first one if there is none."""
    _, _, stack = stacks.partition(number) if number else ("", "", stacks)
    calls = re.findall(r'File "(.+)", line (\d+) in (.+)', stack.partition("\n\n")[0])
    return innermost_line(calls) or "a line that is not known"


class _Pipe:
    """Standard input, by whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self, seconds: float) -> list[str] | None:
        """Read the lines that come within seconds; None if no more can come."""
        if not select.select([0], [], [], seconds)[0]:
            return []
        data = os.read(0, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") + "\n" for line in lines] if data else None

    def wait_for_end(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.read(left) is not None:
            pass
