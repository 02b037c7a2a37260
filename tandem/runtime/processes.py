"""This machine's processes, seen from outside: descendants, their activity, and killing them.

The watchdog and the second Ctrl-C need it. It reads /proc, and does not know the purpose of any
process.
"""

import ctypes
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

WRITE_S = 1.0  # for a report to a terminal, a pipe or a disk that may be what hangs
STARTER = "TANDEM_STARTER"  # in the environment: the pid of the process that started this one
STOPPED, ZOMBIE = "Tt", "Z"
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
    """A process of this machine at the time of listing.

    Example: Process(pid=4711, parent=4700, state="T", command="python -m pytest tests")
    """

    pid: int
    parent: int
    state: str  # a letter of STATES, as ps has it
    command: str

    @property
    def activity(self) -> str:
        """The process's state, and the kernel function in which it waits if that can be read."""
        function = _read(f"/proc/{self.pid}/wchan")
        state = STATES.get(self.state, self.state)
        return state if function in ("", "0") else f"{state}, in {function}"

    def describe(self) -> str:
        return f"  {self.pid} {self.command[:120]}: {self.activity}"


def descendants(pid: int, excluded: Collection[int] = ()) -> list[Process]:
    """List the children of a process, then theirs, zombies included."""
    processes, pids = dict[int, Process](), [pid]
    for other in map(int, filter(str.isdigit, os.listdir("/proc"))):
        state, parent = _stat(f"/proc/{other}/stat")
        if state:
            command = _read(f"/proc/{other}/cmdline").replace("\0", " ").strip()
            processes[other] = Process(pid=other, parent=parent, state=state, command=command)
    for parent in pids:
        pids += [
            process.pid
            for process in processes.values()
            if process.parent == parent and process.pid not in (*excluded, *pids)
        ]
    return [processes[pid] for pid in pids[1:]]


def kill_descendants(pid: int, excluded: Collection[int] = ()) -> None:
    """Send SIGKILL to all descendants, up to three times for those that were born meanwhile."""
    for _ in range(3):
        alive = [process for process in descendants(pid, excluded) if process.state != ZOMBIE]
        for process in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        if not alive:
            return


def kill_group(pid: int) -> None:
    """Kill a process group, which may be gone already; macOS then reports a lack of permission."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def started_at(pid: int) -> float | None:
    """Read when a process was started, in seconds as time.time() has them; None if it has ended.
    For Linux."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if not fields or fields[0] in "ZX":
        return None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def catches(pid: int, signal_number: int) -> bool:
    """Tell whether the process has a handler for the signal; False if that cannot be read."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal_number - 1) & 1)
    return False


def line_of_thread(thread: threading.Thread) -> str:
    """Find the innermost line of a thread outside of the standard library, as "file:line,
    function", or "". The standard library only waits; the cause is in the program or a package."""
    packages = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    library = ("<frozen", sysconfig.get_path("stdlib"))
    frame = sys._current_frames().get(thread.ident or 0)
    for called, line in traceback.walk_stack(frame) if frame is not None else ():
        file = called.f_code.co_filename
        if file.startswith(packages) or not file.startswith(library):
            return f"{file}:{line}, {called.f_code.co_name}"
    return ""


def end_with_starter() -> None:
    """End this process when the one that started it has, if that one asks for it by STARTER."""
    starter = int(os.environ.pop(STARTER, "0"))

    def wait() -> None:
        while os.getppid() == starter:
            time.sleep(0.5)
        text = f"process {os.getpid()} ends: {starter}, which has started it, has ended\n"
        write_report(text, None)
        kill_descendants(os.getpid())
        os._exit(3)

    if starter:
        threading.Thread(target=wait, name="starter", daemon=True).start()


def write_report(text: str, log: Path | None) -> None:
    """Write to stderr and to the end of the log. Gives up on one that hangs and ignores errors."""

    def append() -> None:
        if log is not None:
            with log.open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}")

    for action in (lambda: os.write(2, text.encode(errors="replace")), append):

        def run(action: Callable[[], object] = action) -> None:
            with suppress(OSError):
                action()

        thread = threading.Thread(target=run, daemon=True)  # which may hang without harm
        thread.start()
        thread.join(WRITE_S)


def _stat(path: str) -> tuple[str, int]:
    """Read (state, parent); the name before them stands in brackets and may hold anything."""
    fields = _read(path).rpartition(")")[2].split()
    return (fields[0], int(fields[1])) if fields else ("", 0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # the process is gone, or another user's
        return ""


def adopt_orphans(wanted: bool = True) -> None:
    """Make this process the parent of its children's orphans, or no longer.

    Bubblewrap ends before its namespace, which would then wait for process 1 to take note of its
    end; in a container that is often a program that never does.
    """
    ctypes.CDLL(None).prctl(36, int(wanted), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
