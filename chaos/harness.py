"""Runs a section of the chaos harness in a process of its own, with a deadline, and looks for
leftovers.

    harness (adopts orphans)                    a fork for each section, TMPDIR of its own
    ------------------------                    ------------------------------------------
    wait until it ends, at most deadline_s      section() -> rows.json, exit
    kill what is past the deadline
    a process, a file in TMPDIR or shared memory is left: a bar missed; then it is removed

No process, no port. It does not know what the faults are. Only for a process that has no other
children.
"""

import ctypes
import json
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from chaos.leftovers import shared_memory
from chaos.results import Result
from tandem.runtime.processes import ZOMBIE, Process, descendants, kill_descendants

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 10.0  # for what ends by itself when its parent has ended
# the socket of the forkserver from which sections start runs; a killed one leaves its folder
FORKSERVER = "pymp-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A group of faults, with its deadline.

    Example: Section(name="checkpoints", run=checkpoints.section, deadline_s=600)
    """

    name: str
    run: Callable[[], list[Result]]
    deadline_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of a section; problem and left (behind) are empty when all is well."""

    rows: list[Result]
    problem: str = ""
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def met(self) -> bool:
        return (
            bool(self.rows)
            and all(row.met for row in self.rows)
            and not self.problem
            and not self.left
        )


def run_section(section: Section, grace_s: float = GRACE_S) -> Outcome:
    """Run a section; nothing of it lives on when this returns."""
    _prctl(_PR_SET_CHILD_SUBREAPER)
    start, shared = time.monotonic(), shared_memory()
    place = Path(tempfile.mkdtemp(prefix="tandem-chaos-"))
    rows_file = place / "rows.json"
    (temporary := place / "tmp").mkdir()
    harness = os.getpid()
    try:
        child = os.fork()
        if child == 0:
            _run_child(section, rows_file, temporary, harness)
        problem = _problem(_exit_code(child, section.deadline_s), section.deadline_s)
        left = _leftovers(temporary, shared, grace_s) if not problem else []
        rows = (
            [Result(**row) for row in json.loads(rows_file.read_text())]
            if rows_file.exists()
            else []
        )
        return Outcome(rows=rows, problem=problem, left=left, seconds=time.monotonic() - start)
    finally:
        kill_descendants(os.getpid())
        with suppress(ChildProcessError):  # there are no more
            while True:
                os.waitpid(-1, 0)
        shutil.rmtree(place, ignore_errors=True)


def _run_child(section: Section, rows_file: Path, temporary: Path, harness: int) -> None:
    """Run the section in the child, which ends here."""
    code = 1
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != harness:  # it ended before it could be asked for its signal
            os._exit(1)
        os.environ["TMPDIR"] = str(temporary)
        tempfile.tempdir = None  # so that TMPDIR is looked up again
        rows_file.write_text(json.dumps([asdict(row) for row in section.run()]))
        code = 0
    except BaseException:  # a fork must not return into its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _exit_code(child: int, deadline_s: float) -> int | None:
    """Wait for the exit code; None past the deadline. Until then the child's pid stays its own."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


def _problem(code: int | None, deadline_s: float) -> str:
    if code is None:
        return f"not done at its deadline of {deadline_s:g} s"
    return f"ended with exit code {code}, see above" if code else ""


def _leftovers(temporary: Path, shared: set[str], grace_s: float) -> list[str]:
    left = [f"process {process.pid}: {process.command[:100]}" for process in _living(grace_s)]
    names = sorted(path.name for path in temporary.iterdir())
    left += [f"file {name} in TMPDIR" for name in names if not name.startswith(FORKSERVER)]
    return left + [f"shared memory {name}" for name in sorted(shared_memory() - shared)]


def _living(grace_s: float) -> list[Process]:
    """List the processes that do not end by themselves."""
    until = time.monotonic() + grace_s
    while True:
        _reap()
        alive = [process for process in descendants(os.getpid()) if process.state != ZOMBIE]
        if not alive or time.monotonic() > until:
            return alive
        time.sleep(0.02)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _prctl(option: int, value: int = 1) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
