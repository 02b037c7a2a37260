"""Runs programs that nobody has read: under bubblewrap on this machine, or on a SandboxFusion
server.

Under bubblewrap a program has an unprivileged uid (a root parent gives its own up first, because
limits do not bind root), namespaces of its own without a network, an environment of five words, the
system's /usr read-only and a small /tmp, and limits on time, memory, files, processes and output.
The clock is held here, outside; when it ends, the whole process namespace is killed, and `run`
returns only once that is gone. docs/sandbox.md has what is guaranteed.

It does not know what the programs are for: rewards/code.py compares what they return, and believes
nothing else.

    python -c "from tandem.runtime.sandbox import *; from tandem.config.schema import Sandbox; print(sandbox_state(Sandbox()))"
"""

import base64
import fcntl
import itertools
import json
import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, runtime_checkable

from tandem.runtime.errors import UserError
from tandem.runtime.sandbox.runs import (
    ADOPTION,
    LIMITS,
    Limits,
    Result,
    Run,
    SandboxFailed,
    StopReason,
    watch,
    why,
)
from tandem.runtime.sandbox.seccomp import seccomp_filter

__all__ = [
    "Bubblewrap",
    "Limits",
    "Program",
    "Result",
    "Sandbox",
    "SandboxConfig",
    "SandboxFailed",
    "SandboxFusion",
    "Unisolated",
    "open_sandbox",
    "opened",
    "run_python",
    "sandbox_state",
]

# a command, and the files it finds in its working directory
Program = tuple[Sequence[str], Mapping[str, str]]

NOBODY = 65534
UIDS = 1_500_000_000  # a root parent takes uids from here: a range that no distribution hands out
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",
}
DEVICES = ("null", "zero", "full", "random", "urandom")
# Process 1 of the namespace is bubblewrap's, of the same user and without the limits: its memory
# must not be written to.
HIDE_FIRST = ("--perms", "0000", "--size", "4096", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1")
HTTP_BYTES = 64 * 2**20
SWITCH = "sandbox.run_untrusted_code_without_isolation"
_counter = itertools.count()  # of runs


class SandboxConfig(Protocol):
    """The [sandbox] section of a config."""

    def __hash__(self) -> int: ...

    @property
    def url(self) -> str: ...

    @property
    def run_untrusted_code_without_isolation(self) -> bool: ...


@runtime_checkable
class Sandbox(Protocol):
    """Where untrusted programs run. A command that begins with `python` gets an interpreter."""

    def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] = {},
        stdin: str = "",
        limits: Limits = LIMITS,
    ) -> Result:
        """Run to the end or to a limit, with the files in the working directory; raises
        SandboxFailed."""
        ...


class _Local(ABC):
    """Programs that run on this machine; a subclass starts them."""

    @abstractmethod
    def start(self, program: Program, limits: Limits, stdin: int, stdout: int) -> Run: ...

    def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] = {},
        stdin: str = "",
        limits: Limits = LIMITS,
    ) -> Result:
        with _sealed(stdin.encode()) as fd:
            run = self.start((command, files), limits, fd, subprocess.PIPE)
        watch(run)
        return run.result()

    def converse(
        self, asking: Program, answering: Program, *, limits: Limits = LIMITS
    ) -> tuple[Result, Result]:
        """Run two programs, each one's stdout the other's stdin, until the first ends; their
        results have stderr only."""
        with ExitStack() as stack:
            ends = [fd for _ in range(2) for fd in os.pipe()]
            for fd in ends:
                stack.callback(os.close, fd)
            one = self.start(asking, limits, ends[2], ends[1])
            try:
                other = self.start(answering, limits, ends[0], ends[3])
            except SandboxFailed:
                one.kill("exit")
                one.close()
                raise
        watch(one, other)
        return one.result(), other.result()


@contextmanager
def _sealed(data: bytes) -> Iterator[int]:
    """A file in memory that nobody can write to or resize any more, at its beginning."""
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


def _check_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name:
        raise ValueError(
            f"a sandbox's file is named {name!r}, expected a path inside its working directory"
        )
    return str(path)


# ---------------------------------------------------------------- bubblewrap


class Bubblewrap(_Local):
    """Programs in namespaces of their own, made by bubblewrap for every run."""

    def __init__(self, bwrap: str = "bwrap"):
        self.bwrap = shutil.which(bwrap) or bwrap
        self.python = _interpreter()

    def start(self, program: Program, limits: Limits, stdin: int, stdout: int) -> Run:
        command, files = program
        argv = [self.python, *command[1:]] if command[0] == "python" else list(command)
        with ExitStack() as stack:
            contents = {
                _check_name(name): stack.enter_context(_sealed(t.encode()))
                for name, t in files.items()
            }
            bpf = [stack.enter_context(_sealed(code)) for code in (seccomp_filter(),) if code]
            # no pipe: bubblewrap dies of a broken one, and leaves a process behind
            status = os.memfd_create("status")
            ours, gate = (end.detach() for end in socket.socketpair())
            stack.callback(os.close, gate)
            arguments = [
                *_view(self.python, limits),
                *_contents(contents),
                *_confinement(bpf, status),
            ]
            listed = stack.enter_context(
                _sealed(b"\0".join(os.fsencode(text) for text in arguments))
            )
            bwrap = [self.bwrap, "--args", str(listed), "--"]
            ADOPTION.begin()  # until the run is closed
            try:
                process = subprocess.Popen(
                    [*_without_root(), *bwrap, *_gated(gate), *_limited(limits), *argv],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    env=ENVIRONMENT,
                    pass_fds=[*contents.values(), *bpf, status, gate, listed],
                    start_new_session=True,
                )
            except OSError as error:
                ADOPTION.end()
                for fd in (status, ours):
                    os.close(fd)
                raise SandboxFailed(f"bubblewrap does not start: {error}") from error
        return Run(process, limits, status, ours)


def _view(python: str, limits: Limits) -> list[str]:
    """The files that exist: the system's programs, the interpreter where it lies elsewhere, five
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
    return [*args, "--size", str(limits.disk_mb * 2**20), "--perms", "0700", "--tmpfs", "/tmp"]


def _contents(files: Mapping[str, int]) -> list[str]:
    return [word for name, fd in files.items() for word in ("--file", str(fd), f"/tmp/{name}")]


def _confinement(bpf: Sequence[int], status: int) -> list[str]:
    args = [
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--uid",
        str(NOBODY),
        "--gid",
        str(NOBODY),
    ]
    args += ["--cap-drop", "ALL", "--new-session", "--die-with-parent", "--hostname", "sandbox"]
    args += ["--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
    args += [word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)]
    return [
        *args,
        *(word for fd in bpf for word in ("--seccomp", str(fd))),
        "--json-status-fd",
        str(status),
    ]


def _gated(gate: int) -> list[str]:
    """The words that hold a program back, inside: it asks its parent, and without an answer it
    never begins.

    Bubblewrap's processes die with their parents only once they are set up, as they are when the
    question comes. A parent that was killed before would leave a program that nobody watches.
    """
    return [
        "/usr/bin/bash",
        "-c",
        f'echo >&{gate} && read -r -u {gate} && exec {gate}>&- && exec "$@"',
        "bash",
    ]


def _limited(limits: Limits) -> list[str]:
    """The limits of each process, set inside: the kernel then counts the processes of this
    namespace, not the user's."""
    megabyte = 2**20
    wanted = {
        "as": (resource.RLIMIT_AS, limits.memory_mb * megabyte),
        "nproc": (resource.RLIMIT_NPROC, limits.processes),
        "nofile": (resource.RLIMIT_NOFILE, limits.open_files),
        "fsize": (resource.RLIMIT_FSIZE, limits.file_mb * megabyte),
        "core": (resource.RLIMIT_CORE, 0),
        "memlock": (resource.RLIMIT_MEMLOCK, 0),
        "msgqueue": (resource.RLIMIT_MSGQUEUE, 0),
    }
    args = [f"--{name}={_capped(kind, value)}" for name, (kind, value) in wanted.items()]
    hard = _capped(resource.RLIMIT_CPU, limits.cpu_s + 1)
    return ["/usr/bin/prlimit", *args, f"--cpu={min(limits.cpu_s, hard)}:{hard}", "--"]


def _capped(kind: int, value: int) -> int:
    most = resource.getrlimit(kind)[1]
    return value if most == resource.RLIM_INFINITY else min(value, most)


def _without_root() -> list[str]:
    """The words before bubblewrap that give up root; none where there is no root.

    The uid is no other process's, nor that of this one's 63 runs before; in a container whose uid
    map is short it is `nobody`. Runs of one uid share what the kernel counts by user.
    """
    if os.geteuid():
        return []
    spans = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    uid = UIDS + os.getpid() * 64 % 2**28 + next(_counter) % 64
    if not any(int(start) <= uid < int(start) + int(length) for start, _, length in spans):
        uid = NOBODY
    return [
        "setpriv",
        f"--reuid={uid}",
        f"--regid={uid}",
        "--clear-groups",
        "--inh-caps=-all",
        "--",
    ]


def _interpreter() -> str:
    """This Python, without its virtual environment, if the unprivileged uid can reach it; else the
    system's."""
    own = os.path.realpath(sys.executable)
    places = [Path(own), *Path(own).parents]
    reachable = os.geteuid() != 0 or all(place.stat().st_mode & 0o5 == 0o5 for place in places)
    return own if reachable else "/usr/bin/python3"


# ---------------------------------------------------------------- without isolation, and elsewhere

_LAUNCH = """
import ctypes, os, resource as r, sys
memory, cpu, file, open_files, parent = map(int, sys.argv[1:6])
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != parent: os._exit(1)  # it was killed before
for kind, soft, hard in ((r.RLIMIT_AS, memory, memory), (r.RLIMIT_CPU, cpu, cpu + 1), (r.RLIMIT_FSIZE, file, file),
                         (r.RLIMIT_NOFILE, open_files, open_files), (r.RLIMIT_CORE, 0, 0)):
    r.setrlimit(kind, (soft, hard))
os.execvp(sys.argv[6], sys.argv[6:])
"""


class Unisolated(_Local):
    """Programs as plain processes of yours: they can read, change and send what you can. Only by
    the switch."""

    def start(self, program: Program, limits: Limits, stdin: int, stdout: int) -> Run:
        command, files = program
        argv = [sys.executable, *command[1:]] if command[0] == "python" else list(command)
        named = {_check_name(name): text for name, text in files.items()}
        scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        for name, text in named.items():
            path = Path(scratch.name, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        sizes = (
            limits.memory_mb * 2**20,
            limits.cpu_s,
            limits.file_mb * 2**20,
            limits.open_files,
            os.getpid(),
        )
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCH, *map(str, sizes), *argv],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=scratch.name,
            env={**ENVIRONMENT, "HOME": scratch.name},
            start_new_session=True,
        )
        return Run(process, limits, scratch=scratch)


class SandboxFusion:
    """Programs on a server of ByteDance's SandboxFusion, over its HTTP API; isolation and memory
    are the server's."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")

    def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] = {},
        stdin: str = "",
        limits: Limits = LIMITS,
    ) -> Result:
        others = {
            _check_name(name): base64.b64encode(text.encode()).decode()
            for name, text in files.items()
        }
        script = command[-1]
        python = command[0] == "python" and script in others
        if python:
            del others[script]
        request = {
            "code": files[script] if python else shlex.join(command),
            "language": "python" if python else "bash",
            "stdin": stdin,
            "compile_timeout": limits.wall_s,
            "run_timeout": limits.wall_s,
            "files": others,
        }
        return _fusion_result(self._post("/run_code", request, limits.wall_s), limits)

    def _post(self, path: str, request: dict[str, Any], wall_s: float) -> dict[str, Any]:
        body = json.dumps(request).encode()
        call = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            # its queue comes before its clock
            with urllib.request.urlopen(call, timeout=2 * wall_s + 30) as reply:
                answer = json.loads(reply.read(HTTP_BYTES))
        except (OSError, ValueError) as error:
            raise SandboxFailed(f"no answer from the sandbox at {self.url}: {error}") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("run_result"), dict):
            raise SandboxFailed(
                f"the sandbox at {self.url} did not run the program: {str(answer)[:500]}"
            )
        return answer


def _fusion_result(answer: dict[str, Any], limits: Limits) -> Result:
    ran = answer["run_result"]
    streams = [ran.get(name) or "" for name in ("stdout", "stderr")]
    out, err = (text.encode()[: limits.output_bytes].decode(errors="ignore") for text in streams)
    code = ran.get("return_code")
    if ran.get("status") == "TimeLimitExceeded":
        reason: StopReason = "timeout"
    elif [out, err] != streams:
        reason = "output"
    else:
        reason = why(code, err)
    stopped = reason in ("timeout", "output")
    seconds = float(ran.get("execution_time") or 0.0)
    return Result(
        stdout=out,
        stderr=err,
        exit_code=None if stopped else code,
        stop_reason=reason,
        seconds=seconds,
    )


# ---------------------------------------------------------------- choosing one


def run_python(sandbox: Sandbox, code: str, stdin: str = "", limits: Limits = LIMITS) -> Result:
    """Run a script in a fresh interpreter."""
    return sandbox.run(["python", "main.py"], files={"main.py": code}, stdin=stdin, limits=limits)


def open_sandbox(how: SandboxConfig) -> Sandbox:
    """The sandbox that the config asks for, after a trial run; raises UserError where there is
    none."""
    if how.url:
        return SandboxFusion(how.url)
    trouble = _trouble()
    if not trouble:
        return Bubblewrap()
    if how.run_untrusted_code_without_isolation:
        return Unisolated()
    raise UserError(
        "code of a model needs a sandbox to run in, and there is none",
        where="sandbox",
        found=trouble,
        expected="bubblewrap, or the URL of a SandboxFusion server as sandbox.url",
        next=f"apt-get install bubblewrap (or, to run it as a plain process that can do all you can: {SWITCH}=true)",
    )


opened = cache(open_sandbox)  # one trial run in a process is enough


def _trouble() -> str:
    """Why bubblewrap cannot be used here; empty if it can."""
    missing = [
        name for name in ("bwrap", "prlimit", "setpriv", "bash") if shutil.which(name) is None
    ]
    if missing:
        return f"no {' and no '.join(missing)} on the PATH"
    try:
        result = run_python(Bubblewrap(), "print(6 * 7)", limits=Limits(wall_s=30.0))
    except SandboxFailed as error:
        return str(error)
    worked = (result.stdout, result.exit_code) == ("42\n", 0)
    return (
        ""
        if worked
        else f"a trial run ended by {result.stop_reason}: {result.stderr.strip()[-500:]}"
    )


def sandbox_state(how: SandboxConfig) -> str:
    """One line for `tandem doctor`: what would run code, and a trial of it."""
    try:
        sandbox = open_sandbox(how)
        result = run_python(sandbox, "print(6 * 7)", limits=Limits(wall_s=30.0))
    except UserError as error:
        return f"none: {error.found}; next: apt-get install bubblewrap"
    except SandboxFailed as error:
        return f"fails: {error}"
    works = "works" if result.stdout == "42\n" else f"fails: {result.stderr.strip()[-200:]}"
    match sandbox:
        case Bubblewrap():
            version = subprocess.run(
                [sandbox.bwrap, "--version"], capture_output=True, text=True
            ).stdout.strip()
            return f"{version}, {works} ({result.seconds * 1e3:.0f} ms a run)"
        case Unisolated():
            return f"NOT ISOLATED ({SWITCH}), {works}"
        case _:
            return f"{how.url}, {works}"
