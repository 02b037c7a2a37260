"""Programs on this machine: the base of bubblewrap and plain processes, and the plain ones.

Does not know how bubblewrap confines a program.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tandem.plugins.graders.sandbox.protocol import (
    LIMITS,
    Limits,
    Program,
    Result,
    SandboxFailed,
    check_name,
    trouble_of,
)
from tandem.plugins.graders.sandbox.run import Run, supervise

SWITCH = "sandbox.run_untrusted_code_without_isolation"
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",
}


class LocalSandbox(ABC):
    """A sandbox on this machine; a subclass starts the programs. Implements Sandbox."""

    @abstractmethod
    def start(self, program: Program, limits: Limits, stdin: int, stdout: int) -> Run:
        """Start a program between two descriptors; raises SandboxFailed."""
        ...

    def state(self) -> str:
        if trouble := trouble_of(self):
            return f"fails: {trouble}"
        return f"{self.about()}, works"

    @abstractmethod
    def about(self) -> str:
        """Name the sandbox and its version."""
        ...

    def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] = {},
        stdin: str = "",
        limits: Limits = LIMITS,
    ) -> Result:
        with sealed_file(stdin.encode()) as fd:
            run = self.start((command, files), limits, fd, subprocess.PIPE)
        supervise(run)
        return run.result()

    def converse(
        self, first: Program, second: Program, *, limits: Limits = LIMITS
    ) -> tuple[Result, Result]:
        """Run two programs, each one's stdout the other's stdin, until the first one ends.

        Their results have stderr only.
        """
        with ExitStack() as stack:
            ends = [fd for _ in range(2) for fd in os.pipe()]
            for fd in ends:
                stack.callback(os.close, fd)
            one = self.start(first, limits, ends[2], ends[1])
            try:
                other = self.start(second, limits, ends[0], ends[3])
            except SandboxFailed:
                one.kill("exit")
                one.close()
                raise
        supervise(one, other)
        return one.result(), other.result()


@contextmanager
def sealed_file(data: bytes) -> Iterator[int]:
    """Yield a file in memory, at its beginning, sealed against writing and resizing."""
    fd = os.memfd_create("tandem", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


_LAUNCH = """
import ctypes, os, resource as r, sys
memory, cpu, file, open_files, parent = map(int, sys.argv[1:6])
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != parent: os._exit(1)  # it was killed before
for kind, soft, hard in (
    (r.RLIMIT_AS, memory, memory), (r.RLIMIT_CPU, cpu, cpu + 1), (r.RLIMIT_FSIZE, file, file),
    (r.RLIMIT_NOFILE, open_files, open_files), (r.RLIMIT_CORE, 0, 0),
):
    r.setrlimit(kind, (soft, hard))
os.execvp(sys.argv[6], sys.argv[6:])
"""


class Unisolated(LocalSandbox):
    """Programs as plain processes with all your rights to read, change and send.

    Used only if the config has the switch for it.
    """

    def about(self) -> str:
        return f"NOT ISOLATED ({SWITCH})"

    def start(self, program: Program, limits: Limits, stdin: int, stdout: int) -> Run:
        command, files = program
        argv = [sys.executable, *command[1:]] if command[0] == "python" else list(command)
        texts = {check_name(name): text for name, text in files.items()}
        scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        for name, text in texts.items():
            path = Path(scratch.name, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        numbers = (
            limits.memory_mb * 2**20,
            limits.cpu_s,
            limits.file_mb * 2**20,
            limits.open_files,
            os.getpid(),
        )
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCH, *map(str, numbers), *argv],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=scratch.name,
            env={**ENVIRONMENT, "HOME": scratch.name},
            start_new_session=True,
        )
        return Run(process, limits, scratch=scratch)
