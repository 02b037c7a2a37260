"""Programs on this machine, run as plain processes or by bubblewrap.py: their clock and limits,
held from outside.

A run ends of itself, or is killed here: past its wall clock, its output cap, or (looked at every 20
ms) the memory and the number of files of all its processes together. Killed means its process group
and, under bubblewrap, its process namespace, until that is gone. Output goes to files in memory,
which the kernel lets grow to the cap, and is read in the end.

    parent:  supervise(run): answers at the gate -- every POLL_S: run.check() -- kill, close
    child:   setpriv > bwrap (monitor) > [namespace: bwrap as pid 1 > bash (asks at the gate)
             > prlimit > program]

It does not know how bubblewrap confines a program.
"""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tandem.plugins.graders.sandbox.protocol import (
    LIMITS,
    Limits,
    Program,
    Result,
    SandboxFailed,
    StopReason,
    check_name,
    reason_of_end,
    trouble_of,
)
from tandem.runtime.processes import adopt_orphans

POLL_S = 0.02  # how often memory is looked at; a program that ends sooner is never measured
# a killed namespace is gone in milliseconds; the kernel may be busy freeing its memory
GONE_S = 10.0


@dataclass(slots=True)
class Run:
    """A running program, and the files of its output."""

    process: subprocess.Popen[bytes]
    limits: Limits
    out: int = -1  # a file in memory; -1: its stdout is another program's stdin
    err: int = -1
    status: int = -1  # a file that bubblewrap reports in; -1: there is none
    gate: int = -1  # the program asks here whether to begin; -1: it has begun
    scratch: tempfile.TemporaryDirectory[str] | None = None
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    stop_reason: StopReason | None = None  # why it was killed from here
    written: dict[str, bytes] = field(default_factory=dict)  # its output, once it has ended
    # all that bubblewrap said, once it has ended
    reports: list[dict[str, Any]] = field(default_factory=list)
    inside: tuple[int, int] | None = None  # pid of the namespace's first process, and a pidfd of it

    def begin(self) -> None:
        """Answer at the gate, so that the program begins."""
        self._find_inside()
        # ConnectionResetError: killed before it read the answer
        with suppress(BrokenPipeError, ConnectionResetError):
            os.write(self.gate, b"\n" if os.read(self.gate, 16) else b"")
        os.close(self.gate)
        self.gate = -1

    def _reports(self) -> list[dict[str, Any]]:
        """Read bubblewrap's reports: {"child-pid": ...} first, {"exit-code": ...} in the end."""
        text = os.pread(self.status, 65536, 0) if self.status >= 0 else b""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]

    def _find_inside(self) -> None:
        for report in self._reports()[:1]:
            with suppress(ProcessLookupError):
                self.inside = self.inside or (
                    report["child-pid"],
                    os.pidfd_open(report["child-pid"]),
                )

    def check(self) -> None:
        """Kill the run if it is past its wall clock, output, memory or number of files."""
        if time.monotonic() - self.started > self.limits.wall_s:
            self.kill("timeout")
        elif any(os.fstat(fd).st_size > self.limits.output_bytes for fd in self._files()):
            self.kill("output")
        elif self.inside is not None and _uses_too_much(self.inside[0], self.limits):
            self.kill("memory")

    def _files(self) -> list[int]:
        return [fd for fd in (self.out, self.err) if fd >= 0]

    def kill(self, reason: StopReason) -> None:
        self.stop_reason = self.stop_reason or reason
        self._find_inside()
        # PermissionError: a zombie's group, on some systems
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.inside is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.inside[1], signal.SIGKILL)

    def close(self) -> None:
        """Wait until nothing of the run is left, and read its output; `ended` is when it ended."""
        self.process.wait()
        self.ended = time.monotonic()
        self.reports = self._reports()
        with suppress(ProcessLookupError, PermissionError):
            # leftovers of a program without a namespace
            os.killpg(self.process.pid, signal.SIGKILL)
        gone = self.inside is None or bool(wait([self.inside[1]], GONE_S))
        if self.inside is not None and gone:
            # it became a child of this process, unless another one adopted it
            with suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self.inside[1], os.WEXITED)
        most = self.limits.output_bytes
        for fd, name in ((self.out, "out"), (self.err, "err")):
            self.written[name] = os.pread(fd, most + 1, 0) if fd >= 0 else b""
            if len(self.written[name]) > most:
                self.stop_reason = self.stop_reason or "output"
        for fd in (*self._files(), self.status, self.gate, *(self.inside or (-1, -1))[1:]):
            if fd >= 0:
                os.close(fd)
        if self.status >= 0:
            ADOPTION.end()
        if self.scratch is not None:
            self.scratch.cleanup()
        if not gone:
            raise SandboxFailed(f"a killed namespace is still there after {GONE_S:.0f} s")

    def result(self) -> Result:
        out, err = (
            self.written[name][: self.limits.output_bytes].decode(errors="replace")
            for name in ("out", "err")
        )
        code = None if self.stop_reason else self._exit_code(err)
        return Result(
            stdout=out,
            stderr=err,
            exit_code=code,
            stop_reason=self.stop_reason or reason_of_end(code, err),
            seconds=self.ended - self.started,
        )

    def _exit_code(self, err: str) -> int:
        if self.status < 0:
            return self.process.returncode
        for report in self.reports:
            if "exit-code" in report:
                code = int(report["exit-code"])
                return 128 - code if 128 < code <= 128 + signal.NSIG else code
        raise SandboxFailed(
            f"bubblewrap ended with {self.process.returncode} before the program began: "
            f"{err.strip()}"
        )


def _uses_too_much(first: int, limits: Limits) -> bool:
    """Tell whether a namespace's processes hold too much memory together, or its /tmp too many
    files.

    Pages that processes share after a fork count for each of them. A process that ends meanwhile
    counts as nothing.
    """
    used, pids, files = 0, [first], 0
    for pid in pids:
        with suppress(OSError):
            sizes = Path(f"/proc/{pid}/statm").read_text().split()
            used += (int(sizes[1]) - int(sizes[2])) * resource.getpagesize()  # resident, shared
            for task in os.listdir(f"/proc/{pid}/task"):
                pids += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    with suppress(OSError):
        tmp = os.statvfs(f"/proc/{pids[-1]}/root/tmp")
        # before it is mounted, this is another /tmp
        if tmp.f_blocks * tmp.f_frsize == limits.disk_mb * 2**20:
            files = tmp.f_files - tmp.f_ffree
    return used > limits.memory_mb * 2**20 or files > limits.files


class Adoption:
    """An adoption of orphans only while a run lasts: those of other children would stay zombies."""

    def __init__(self) -> None:
        self._lock, self._runs = threading.Lock(), 0

    def begin(self) -> None:
        with self._lock:
            self._runs += 1
            adopt_orphans()

    def end(self) -> None:
        with self._lock:
            self._runs -= 1
            if not self._runs:
                adopt_orphans(False)


ADOPTION = Adoption()


def supervise(*runs: Run) -> None:
    """Enforce the runs' limits until the first has ended; then end the others.

    An interrupt, such as Ctrl-C, ends all of them too.
    """
    first = runs[0].process
    try:
        with open(os.pidfd_open(first.pid), "rb", 0) as end:  # so that an end is seen at once
            while first.poll() is None:
                asking = {run.gate: run for run in runs if run.gate >= 0}
                for ready in wait([end.fileno(), *asking], POLL_S):
                    if ready in asking:
                        asking[ready].begin()
                for run in runs:
                    run.check()
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.kill("exit")
        for run in runs:
            run.close()


# ---------------------------------------------------------------- the sandboxes

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

    limits = LIMITS

    @abstractmethod
    def start(self, program: Program, limits: Limits, stdin: int, stdout: int | None = None) -> Run:
        """Start a program that reads from a descriptor and writes to another; without that, to a
        file of the run. Raises SandboxFailed."""
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
            run = self.start((command, files), limits, fd)
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


def output_files(stdout: int | None) -> tuple[int, int]:
    """Open files in memory for a program's stdout and stderr; -1 for stdout if it has another."""
    out, err = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("out", "err"))
    if stdout is not None:
        os.close(out)
    return (out if stdout is None else -1), err


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


def limited(limits: Limits) -> list[str]:
    """Return the words that limit each process of a program. Those inside a namespace are counted
    there, and not with the user's."""
    megabyte = 2**20
    wanted = {
        "as": (resource.RLIMIT_AS, limits.memory_mb * megabyte),
        "nproc": (resource.RLIMIT_NPROC, limits.processes),
        "nofile": (resource.RLIMIT_NOFILE, limits.open_files),
        "fsize": (resource.RLIMIT_FSIZE, limits.file_bytes),
        "core": (resource.RLIMIT_CORE, 0),
        "memlock": (resource.RLIMIT_MEMLOCK, 0),
        "msgqueue": (resource.RLIMIT_MSGQUEUE, 0),
    }
    args = [f"--{name}={_capped(kind, value)}" for name, (kind, value) in wanted.items()]
    hard = _capped(resource.RLIMIT_CPU, limits.cpu_s + 1)
    return ["/usr/bin/prlimit", *args, f"--cpu={min(limits.cpu_s, hard)}:{hard}", "--"]


def _capped(kind: int, value: int) -> int:
    """Cap a limit at this process's own hard one, which cannot be raised."""
    most = resource.getrlimit(kind)[1]
    return value if most == resource.RLIM_INFINITY else min(value, most)


class Unisolated(LocalSandbox):
    """Programs as plain processes with all your rights to read, change and send.

    Used only if the config has the switch for it.
    """

    def about(self) -> str:
        return f"NOT ISOLATED ({SWITCH})"

    def start(self, program: Program, limits: Limits, stdin: int, stdout: int | None = None) -> Run:
        command, files = program
        argv = [sys.executable, *command[1:]] if command[0] == "python" else list(command)
        texts = {check_name(name): text for name, text in files.items()}
        scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        for name, text in texts.items():
            path = Path(scratch.name, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        # it may have been killed before
        watched = ["bash", "-c", f'[ $PPID = {os.getpid()} ] && exec "$@"', "bash"]
        # the user's other processes would count too
        alone = [word for word in limited(limits) if not word.startswith("--nproc")]
        out, err = output_files(stdout)
        process = subprocess.Popen(
            ["/usr/bin/setpriv", "--pdeathsig", "KILL", *watched, *alone, *argv],
            stdin=stdin,
            stdout=out if stdout is None else stdout,
            stderr=err,
            cwd=scratch.name,
            env={**ENVIRONMENT, "HOME": scratch.name},
            start_new_session=True,
        )
        return Run(process, limits, out, err, scratch=scratch)
