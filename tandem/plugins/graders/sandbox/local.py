"""Programs on this machine, run as plain processes or by bubblewrap.py: their clock and limits,
held from outside.

A run ends of itself, or is killed here: past its wall clock, its output cap, or (looked at every 20
ms) the memory and the number of files of all its processes together. Killed means its process group
and, under bubblewrap, its process namespace, until that is gone. Output is read as it comes and
kept up to the cap, so a flood costs nothing.

    parent:  supervise(run): reads stdout, stderr, gate -- every POLL_S: run.check() -- kill, close
    child:   setpriv > bwrap (monitor) > [namespace: bwrap as pid 1 > bash (asks at the gate)
             > prlimit > program]

It does not know how bubblewrap confines a program.
"""

import fcntl
import json
import os
import resource
import select
import selectors
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
MAPS_BYTES = 2**20  # some 10,000 mappings: numpy has 300
# a killed namespace is gone in milliseconds; the kernel may be busy freeing its memory
GONE_S = 10.0


@dataclass(slots=True)
class Run:
    """A running program and its output so far."""

    process: subprocess.Popen[bytes]
    limits: Limits
    status: int = -1  # a file that bubblewrap reports in; -1: there is none
    gate: int = -1  # the program asks here whether to begin, and begins at any answer
    scratch: tempfile.TemporaryDirectory[str] | None = None
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    stop_reason: StopReason | None = None  # why it was killed from here
    written: dict[str, bytearray] = field(
        default_factory=lambda: {"out": bytearray(), "err": bytearray()}
    )
    # all that bubblewrap said, once it has ended
    reports: list[dict[str, Any]] = field(default_factory=list)
    inside: tuple[int, int] | None = None  # pid of the namespace's first process, and a pidfd of it
    # of each mapped shared memory, as large as it was seen
    shared_bytes: dict[str, int] = field(default_factory=dict)

    def streams(self) -> Iterator[tuple[int, str]]:
        """Yield the descriptors to read from, with their names."""
        for stream, name in ((self.process.stdout, "out"), (self.process.stderr, "err")):
            if stream is not None:
                yield stream.fileno(), name
        if self.gate >= 0:
            yield self.gate, "gate"

    def on_data(self, name: str, data: bytes) -> None:
        """Keep data of a stream, up to the cap; answer at the gate."""
        if name == "gate":
            self._find_inside()
            with suppress(BrokenPipeError):
                os.write(self.gate, b"\n" if data else b"")
            return
        self.written[name] += data
        if len(self.written[name]) > self.limits.output_bytes:
            del self.written[name][self.limits.output_bytes :]
            self.kill("output")

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
        """Kill the run if it is past its wall clock, memory or number of files."""
        if time.monotonic() - self.started > self.limits.wall_s:
            self.kill("timeout")
        elif self.inside is not None and _uses_too_much(
            self.inside[0], self.limits, self.shared_bytes
        ):
            self.kill("memory")

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
        """Wait until nothing of the run is left; `ended` is when its last output was read."""
        self.ended = time.monotonic()
        self.process.wait()
        self.reports = self._reports()
        with suppress(ProcessLookupError, PermissionError):
            # leftovers of a program without a namespace
            os.killpg(self.process.pid, signal.SIGKILL)
        gone = self.inside is None or bool(select.select([self.inside[1]], [], [], GONE_S)[0])
        if self.inside is not None and gone:
            # it became a child of this process, unless another one adopted it
            with suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self.inside[1], os.WEXITED)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        for fd in (self.status, self.gate, *(self.inside or (-1, -1))[1:]):
            if fd >= 0:
                os.close(fd)
        if self.status >= 0:
            ADOPTION.end()
        if self.scratch is not None:
            self.scratch.cleanup()
        if not gone:
            raise SandboxFailed(f"a killed namespace is still there after {GONE_S:.0f} s")

    def result(self) -> Result:
        out, err = (bytes(self.written[name]).decode(errors="replace") for name in ("out", "err"))
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


def _uses_too_much(first: int, limits: Limits, shared_bytes: dict[str, int]) -> bool:
    """Tell whether a namespace's processes hold too much memory together, or its /tmp too many
    files.

    Pages that processes share after a fork count for each of them. Shared memory counts once for
    all its processes, at its largest size seen: unmapping hides pages from every count of resident
    memory. A process that ends meanwhile counts as nothing.
    """
    used, pids, before = 0, [first], dict(shared_bytes)
    shared_bytes.clear()  # forget mappings without a process
    for pid in pids:
        with suppress(OSError):
            resident, shared = (
                int(number) for number in Path(f"/proc/{pid}/statm").read_text().split()[1:3]
            )
            used += (resident - shared) * resource.getpagesize()
            for task in os.listdir(f"/proc/{pid}/task"):
                pids += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
            for name, size in _shared_mappings(pid):
                shared_bytes[name] = max(size, shared_bytes.get(name, 0), before.get(name, 0))
    used += sum(shared_bytes.values())
    files = 0
    with suppress(OSError):
        tmp = os.statvfs(f"/proc/{pids[-1]}/root/tmp")
        # before it is mounted, this is another /tmp
        if tmp.f_blocks * tmp.f_frsize == limits.disk_mb * 2**20:
            files = tmp.f_files - tmp.f_ffree
    return used > limits.memory_mb * 2**20 or files > limits.files


def _shared_mappings(pid: int) -> Iterator[tuple[str, int]]:
    """Yield (inode, bytes up to its end) of each shared anonymous mapping of a process."""
    with open(f"/proc/{pid}/maps", "rb") as file:
        text = file.read(MAPS_BYTES)
    if len(text) == MAPS_BYTES:
        yield "too many mappings to look through", 2**62
    for line in text.splitlines():
        if b"/dev/zero (deleted)" in line:  # "start-end permissions offset device inode path"
            addresses, permissions, offset, _, inode = line.split()[:5]
            start, end = (int(address, 16) for address in addresses.split(b"-"))
            if permissions.endswith(b"s"):
                yield inode.decode(), int(offset, 16) + end - start


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
    """Read the runs' output and enforce their limits until the first has ended; then end the
    others.

    An interrupt, such as Ctrl-C, ends all of them too.
    """
    try:
        _read(runs)
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.kill("exit")
        for run in runs:
            run.close()


def _read(runs: Sequence[Run]) -> None:
    """Read until the first one's process has ended; a program can close its output and live on."""
    first = runs[0]
    with (
        selectors.DefaultSelector() as selector,
        open(os.pidfd_open(first.process.pid), "rb", 0) as end,
    ):
        for run in runs:
            for fd, name in run.streams():
                selector.register(fd, selectors.EVENT_READ, (run, name))
        selector.register(end, selectors.EVENT_READ, (None, ""))  # so that an end is seen at once
        checked = time.monotonic()
        while first.process.poll() is None or any(
            key.data[0] is first for key in selector.get_map().values()
        ):
            # asked before, so that its last output is there now
            ended = first.process.poll() is not None
            ready = selector.select(POLL_S)
            for key, _ in ready:
                run, name = key.data
                data = b""
                with suppress(ConnectionResetError):  # killed before it read the gate's answer
                    data = os.read(key.fd, 65536) if run else b""
                if run:
                    run.on_data(name, data)
                if not data:
                    selector.unregister(key.fileobj)
            if time.monotonic() - checked >= POLL_S:
                checked = time.monotonic()
                for run in runs:
                    run.check()
            late = time.monotonic() - first.started > first.limits.wall_s + 1
            if ended and (late or not ready):
                break  # an orphan outside any namespace still holds the pipes


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
