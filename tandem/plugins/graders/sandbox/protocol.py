"""The callers' view of a sandbox: a command with files and limits goes in, a Result comes out.

Does not know how a program is confined.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from tandem.registry import find

if TYPE_CHECKING:
    from tandem.config.episodes import Sandbox as SandboxConfig

# a command, and the files it finds in its working directory
Program = tuple[Sequence[str], Mapping[str, str]]
StopReason = Literal["exit", "timeout", "memory", "output", "signal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The resources that a run may use.

    Memory, CPU and file size bind each process; memory_mb also binds all of them together.
    """

    wall_s: float = 5.0
    cpu_s: int = 5
    memory_mb: int = 512
    disk_mb: int = 16  # all files together
    file_mb: int = 16  # one file
    files: int = 4096  # files and directories that exist at once
    open_files: int = 64
    processes: int = 16  # threads count, and so does bubblewrap's own
    output_bytes: int = 65536  # of stdout, and again of stderr
    folders: tuple[str, ...] = ()  # of bubblewrap, to write beside /tmp: each of disk_mb

    @property
    def file_bytes(self) -> int:
        """The largest file: one of output is one too, and tells that it is over its limit."""
        return max(self.file_mb * 2**20, self.output_bytes + 1)


LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The end of a run.

    Example:
        Result(stdout="4\\n", stderr="", exit_code=0, stop_reason="exit", seconds=0.014)
    """

    stdout: str
    stderr: str
    # minus the signal's number after "signal"; None if it was stopped from outside
    exit_code: int | None
    stop_reason: StopReason  # "exit": of itself, with any code
    seconds: float


class SandboxFailed(RuntimeError):
    """A failure of the sandbox itself, not of the program."""


@runtime_checkable
class Sandbox(Protocol):
    """A place where untrusted programs run."""

    limits: Limits  # of a run that names no others

    def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] = {},
        stdin: str = "",
        limits: Limits = LIMITS,
    ) -> Result:
        """Run a command to its end or to a limit, with the files in its working directory.

        A command that begins with `python` gets an interpreter. Raises SandboxFailed.
        """
        ...

    def state(self) -> str:
        """Describe the sandbox in one line, for `tandem doctor`, after a trial of it."""
        ...


@cache  # one trial run in a process is enough
def open_sandbox(config: "SandboxConfig") -> Sandbox:
    """Open the sandbox of a config; raises UserError if there is none."""
    return find("sandboxes", config.kind, key="sandbox")(config)  # type: ignore[no-any-return]


def run_python(sandbox: Sandbox, code: str, stdin: str = "", limits: Limits = LIMITS) -> Result:
    """Run a script in a fresh interpreter."""
    return sandbox.run(["python", "main.py"], files={"main.py": code}, stdin=stdin, limits=limits)


def trouble_of(sandbox: Sandbox) -> str:
    """Say why a trial program does not run in a sandbox, or ""."""
    try:
        result = run_python(sandbox, "print(6 * 7)", limits=Limits(wall_s=30.0))
    except SandboxFailed as error:
        return str(error)
    if (result.stdout, result.exit_code) == ("42\n", 0):
        return ""
    return f"a trial run ended by {result.stop_reason}: {result.stderr.strip()[-500:]}"


def check_name(name: str) -> str:
    """Return the name of a file, normalized; raises ValueError if it leaves the directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name:
        raise ValueError(
            f"a sandbox's file is named {name!r}, expected a path inside its working directory"
        )
    return str(path)


def reason_of_end(exit_code: int | None, stderr: str) -> StopReason:
    """Tell why a program ended by itself; no code is a timeout."""
    if exit_code in (-signal.SIGXCPU, None):
        return "timeout"
    if exit_code and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return "memory"
    return "signal" if exit_code < 0 else "exit"
