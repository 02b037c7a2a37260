"""Programs in namespaces of their own, made by bubblewrap for every run.

A program has an unprivileged uid (a root parent gives its own up first, because limits do not bind
root), no network, an environment of five words, the system's /usr read-only and a small /tmp, and
limits on time, memory, files, processes and output. local.py holds the clock, outside; when time is
up or the program ends, the whole process namespace is killed, and `run` returns only once that is
gone.
"""

import itertools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tandem.config.schema import Sandbox as SandboxConfig
from tandem.plugins.graders.sandbox.local import (
    ADOPTION,
    ENVIRONMENT,
    SWITCH,
    LocalSandbox,
    Run,
    Unisolated,
    limited,
    output_files,
    sealed_file,
)
from tandem.plugins.graders.sandbox.protocol import (
    Limits,
    Program,
    Sandbox,
    SandboxFailed,
    check_name,
    trouble_of,
)
from tandem.plugins.graders.sandbox.seccomp import seccomp_filter
from tandem.runtime.errors import UserError

NOBODY = 65534
UIDS = 1_500_000_000  # a root parent takes uids from here: a range that no distribution hands out
DEVICES = (
    "null",
    "full",
    "random",
    "urandom",
)  # not zero: mapped, it is memory that no limit counts
# Process 1 of the namespace is bubblewrap's, of the same user and without the limits: its memory
# must not be written to.
HIDE_FIRST = ("--perms", "0000", "--size", "4096", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1")
_run_numbers = itertools.count()


def open_bubblewrap(config: SandboxConfig) -> Sandbox:
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
