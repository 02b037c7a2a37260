"""Programs on this machine, run as plain processes or by bubblewrap: their clock and limits, held
from outside, and their namespaces.

A run ends of itself, or is killed here: past its wall clock, its output cap, or (looked at every 20
ms) the memory and the number of files of all its processes together. Killed means its process group
and, under bubblewrap, its process namespace, until that is gone. Output goes to files in memory,
which the kernel lets grow to the cap, and is read in the end.

    parent:  supervise(run): answers at the gate -- every POLL_S: run.check() -- kill, close
    child:   setpriv > bwrap (monitor) > [namespace: bwrap as pid 1 > bash (asks at the gate)
             > prlimit > program]

Under bubblewrap a program has an unprivileged uid (a root parent gives its own up first, because
limits do not bind root), no network, an environment of five words, the system's /usr read-only and
a small /tmp. `run` returns only once its namespace is gone.
"""

import fcntl
import itertools
import json
import os
import resource
import shutil
import signal
import socket
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
from typing import TYPE_CHECKING, Any

from tandem.plugins.graders.sandbox.protocol import (
    LIMITS,
    Limits,
    Program,
    Result,
    Sandbox,
    SandboxFailed,
    StopReason,
    check_name,
    reason_of_end,
    trouble_of,
)
from tandem.plugins.graders.sandbox.seccomp import seccomp_filter
from tandem.runtime.errors import UserError
from tandem.runtime.processes import adopt_orphans

if TYPE_CHECKING:
    from tandem.config.episodes import Sandbox as SandboxConfig

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


# ---------------------------------------------------------------- bubblewrap


NOBODY = 65534
UIDS = 1_500_000_000  # a root parent takes uids from here: a range that no distribution hands out
# not zero: mapped, it is memory that no limit counts
DEVICES = ("null", "full", "random", "urandom")
# Process 1 of the namespace is bubblewrap's, of the same user and without the limits: its memory
# must not be written to.
HIDE_FIRST = ("--perms", "0000", "--size", "4096", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1")
_run_numbers = itertools.count()


def open_bubblewrap(config: "SandboxConfig") -> Sandbox:
    """Open bubblewrap after a trial run; where it does not work, with the config's switch a place
    for plain processes. Raises UserError."""
    programs = ("bwrap", "prlimit", "setpriv", "bash")
    if missing := [name for name in programs if shutil.which(name) is None]:
        trouble = f"no {' and no '.join(missing)} on the PATH"
    else:
        trouble = trouble_of(Bubblewrap())
    if not trouble:
        return Bubblewrap()
    if config.run_untrusted_code_without_isolation:
        return Unisolated()
    raise UserError(
        "code of a model needs a sandbox to run in, and there is none",
        where="sandbox",
        found=trouble,
        expected="bubblewrap, or the URL of a SandboxFusion server as sandbox.url",
        next="apt-get install bubblewrap "
        f"(or, to run it as a plain process that can do all you can: {SWITCH}=true)",
    )


class Bubblewrap(LocalSandbox):
    """The sandbox by this bubblewrap."""

    def __init__(self, bwrap: str = "bwrap"):
        self.bwrap = shutil.which(bwrap) or bwrap
        # this Python, without its virtual environment, if the unprivileged uid can reach it
        own = os.path.realpath(sys.executable)
        places = [Path(own), *Path(own).parents]
        reachable = os.geteuid() != 0 or all(place.stat().st_mode & 0o5 == 0o5 for place in places)
        self.python = own if reachable else "/usr/bin/python3"

    def about(self) -> str:
        command = [self.bwrap, "--version"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    def start(self, program: Program, limits: Limits, stdin: int, stdout: int | None = None) -> Run:
        command, files = program
        argv = [self.python, *command[1:]] if command[0] == "python" else list(command)
        with ExitStack() as stack:
            contents = {
                check_name(name): stack.enter_context(sealed_file(text.encode()))
                for name, text in files.items()
            }
            bpf = [stack.enter_context(sealed_file(code)) for code in (seccomp_filter(),) if code]
            # no pipe: bubblewrap dies of a broken one, and leaves a process behind
            status = os.memfd_create("status")
            ours, gate = (end.detach() for end in socket.socketpair())
            stack.callback(os.close, gate)
            arguments = [
                *_view(self.python, limits),
                *(
                    word
                    for name, fd in contents.items()
                    for word in ("--file", str(fd), f"/tmp/{name}")
                ),
                *_confinement(bpf, status),
            ]
            data = b"\0".join(os.fsencode(text) for text in arguments)
            arguments_fd = stack.enter_context(sealed_file(data))
            bwrap = [self.bwrap, "--args", str(arguments_fd), "--"]
            out, err = output_files(stdout)
            ADOPTION.begin()  # until the run is closed
            try:
                process = subprocess.Popen(
                    [*_without_root(), *bwrap, *_gated(gate), *limited(limits), *argv],
                    stdin=stdin,
                    stdout=out if stdout is None else stdout,
                    stderr=err,
                    cwd="/",
                    env=ENVIRONMENT,
                    pass_fds=[*contents.values(), *bpf, status, gate, arguments_fd],
                    start_new_session=True,
                )
            except OSError as error:
                ADOPTION.end()
                for fd in {status, ours, out, err} - {-1}:
                    os.close(fd)
                raise SandboxFailed(f"bubblewrap does not start: {error}") from error
        return Run(process, limits, out, err, status, ours)


def _view(python: str, limits: Limits) -> list[str]:
    """List the visible files: the system's programs, the interpreter if it lies elsewhere, five
    devices, a /tmp."""
    args = ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            args += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            args += ["--ro-bind", str(path), str(path)]
    if not python.startswith("/usr/"):
        library = str(Path(python).parent.parent / "lib")
        args += ["--ro-bind", python, python, "--ro-bind", library, library]
    for name in DEVICES:
        args += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    args += ["--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/tmp", "/dev/shm"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        args += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    args += ["--proc", "/proc", *HIDE_FIRST]
    for name in ("tmp", *limits.folders):
        args += ["--size", str(limits.disk_mb * 2**20), "--perms", "0700", "--tmpfs", f"/{name}"]
    return args


def _confinement(bpf: Sequence[int], status: int) -> list[str]:
    nobody = str(NOBODY)
    args = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", nobody, "--gid", nobody]
    args += ["--cap-drop", "ALL", "--new-session", "--die-with-parent", "--hostname", "sandbox"]
    args += ["--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
    args += [word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)]
    args += [word for fd in bpf for word in ("--seccomp", str(fd))]
    return [*args, "--json-status-fd", str(status)]


def _gated(gate: int) -> list[str]:
    """Return the words that hold a program back, inside: it asks its parent, and never begins
    without an answer.

    Bubblewrap's processes die with their parents only once they are set up, as they are when the
    question comes. A parent killed before would leave an unwatched program.
    """
    script = f'echo >&{gate} && read -r -u {gate} && exec {gate}>&- && exec "$@"'
    return ["/usr/bin/bash", "-c", script, "bash"]


def _without_root() -> list[str]:
    """Return the words before bubblewrap that give up root; none if this process is not root.

    No other process has the uid, nor had this one's last 63 runs; in a container with a short uid
    map it is `nobody`. Runs of one uid share the kernel's counts by user.
    """
    if os.geteuid():
        return []
    spans = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    uid = UIDS + os.getpid() * 64 % 2**28 + next(_run_numbers) % 64
    if not any(int(start) <= uid < int(start) + int(length) for start, _, length in spans):
        uid = NOBODY
    ids = [f"--reuid={uid}", f"--regid={uid}"]
    return ["setpriv", *ids, "--clear-groups", "--inh-caps=-all", "--"]
