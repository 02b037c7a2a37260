"""What is known of this machine's processes from outside: descendants, what they do, and how they
are ended.

The watchdog, its guard and the second Ctrl-C need it. It does not know what any process is for, and
imports little, as the guard starts with every run. Without /proc (macOS) it asks `ps`, and knows
less.
"""

import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

WRITE_S = 1.0  # for a report to a terminal, a pipe or a disk that may be what hangs
# of each report
NEXT = "next: the same command resumes from the last checkpoint; run.stall_s is the deadline\n"
STOPPED, ENDED = "Tt", "Z"
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended, and nobody has asked for its exit status",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Example: Process(pid=4711, parent=4700, state="T", command="python -m
    tandem.rewards.pool.fork_server answer")"""

    pid: int
    parent: int
    state: str  # a letter of STATES, as ps has it
    command: str

    @property
    def position(self) -> str:
        """What it does, as far as one can tell from outside."""
        where = _read(f"/proc/{self.pid}/wchan")
        return STATES.get(self.state, self.state) + (
            f", in {where}" if where not in ("", "0") else ""
        )

    def describe(self) -> str:
        return f"  {self.pid} {self.command[:120]}: {self.position}"


def descendants(of: int, besides: Collection[int] = ()) -> list[Process]:
    """Children first, then theirs; those that have ended and were not collected are among them."""
    everyone, found = _everyone(), [of]
    for pid in found:
        found += [
            p.pid for p in everyone.values() if p.parent == pid and p.pid not in (*besides, *found)
        ]
    return [everyone[pid] for pid in found[1:]]


def end_descendants(of: int, besides: Collection[int] = ()) -> None:
    """SIGKILL to all of them, and once more to those that were born meanwhile."""
    for _ in range(3):
        alive = [process for process in descendants(of, besides) if process.state != ENDED]
        for process in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        if not alive:
            return


def state_of(pid: int, thread: int = 0) -> str:
    """A letter of STATES; empty where that is not known."""
    return _stat(f"/proc/{pid}/task/{thread or pid}/stat")[0]


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal; false where that is not known."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def is_ours(file: str) -> bool:
    """Whether a line of Python is of the program or a package, not of the standard library: there
    is the cause."""
    packages = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return not file.startswith("<frozen") and (
        file.startswith(packages) or not file.startswith(sysconfig.get_path("stdlib"))
    )


def tell(text: str, log: Path | None) -> None:
    """Write to stderr and to the end of the log; whichever hangs is left behind, and what fails is
    passed over."""
    within(WRITE_S, lambda: os.write(2, text.encode(errors="replace")))
    if log is not None:
        within(WRITE_S, lambda: _append(log, text))


def within(seconds: float, action: Callable[[], object]) -> None:
    """Do it in a thread that may hang without harm."""

    def run() -> None:
        with suppress(OSError):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


def _append(log: Path, text: str) -> None:
    with log.open("a", encoding="utf-8", errors="replace") as file:
        file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}")


def _everyone() -> dict[int, Process]:
    if not Path("/proc/self/stat").exists():
        return _by_ps()
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        state, parent = _stat(f"/proc/{pid}/stat")
        if state:
            command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
            found[pid] = Process(pid=pid, parent=parent, state=state, command=command)
    return found


def _by_ps() -> dict[int, Process]:
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat=,command="], capture_output=True, text=True, timeout=5
    )
    rows = [line.split(None, 3) for line in listed.stdout.splitlines()]
    return {
        int(pid): Process(
            pid=int(pid), parent=int(parent), state=state[0], command=" ".join(command)
        )
        for pid, parent, state, *command in rows
    }


def _stat(path: str) -> tuple[str, int]:
    """(state, parent); the name before them is in brackets and may hold anything."""
    fields = _read(path).rpartition(")")[2].split()
    return (fields[0], int(fields[1])) if fields else ("", 0)


def _read(path: str) -> str:
    if sys.platform != "linux":
        return ""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # it is gone, or not ours to know
        return ""
