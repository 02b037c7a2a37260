"""A host worth attacking: a secret file, a secret in the environment, listeners, a process that can
be killed.

A hostile program prints WITNESS when it begins, and ESCAPED where it got what it must not get; the
world sees what it did behind its back. It knows nothing of pytest, so that benchmarks/sandbox.py
runs the same corpus.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.plugins.graders.sandbox.protocol import Limits

# nothing that ends by itself comes near, however busy the machine is
LIMITS = Limits(wall_s=60.0, cpu_s=10)
ROOT = Path(__file__).parent.parent.parent
MODULES = ("ctypes", "os", "signal", "socket", "subprocess", "sys", "threading", "time")
PRELUDE = """
def escaped(what): print("ESCAPED", what, flush=True)
print("WITNESS", flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """A program, and what becomes of it."""

    name: str
    code: str  # $SECRET, $TCP ... stand for what the world has
    stops: tuple[str, ...] = ("exit", "signal")  # the stop reasons that are right for it
    # without a sandbox it gets through: for "any" user, as "root", "perhaps"; "": not to be tried
    # there
    open: str = ""
    limits: Limits = LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    ran: bool
    escapes: tuple[str, ...]  # what it said it got, and what the world saw
    stop_reason: str
    seconds: float


class World:
    """The host's side; a context."""

    def __enter__(self):
        self.stack = ExitStack()
        self.home = Path(
            self.stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-hostile-"))
        )
        self.token = f"token{os.getpid()}x{time.monotonic_ns()}"
        (self.home / "secret").write_text(self.token)
        self.tcp = self._listener(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))
        self.udp = self._listener(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))
        self.abstract = self._listener(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + self.token)
        self.path = self._listener(socket.AF_UNIX, socket.SOCK_STREAM, str(self.home / "socket"))
        self.victim = self._sleeper()
        return self

    def __exit__(self, *exc):
        self.victim.kill()
        self.victim.wait()
        self.stack.close()

    def _listener(self, family, kind, address):
        listener = self.stack.enter_context(socket.socket(family, kind))
        listener.bind(address)
        if kind == socket.SOCK_STREAM:
            listener.listen(64)
        return listener

    def _sleeper(self):
        env = {**os.environ, "TANDEM_SECRET": self.token}
        return subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(10**6)", "victim"], env=env
        )

    def fill(self, code):
        values = {
            "$SECRET": str(self.home / "secret"),
            "$HOME": str(Path.home()),
            "$REPOSITORY": str(ROOT),
            "$WORLD": str(self.home),
            "$TOKEN": self.token,
            "$TCP": str(self.tcp.getsockname()[1]),
            "$UDP": str(self.udp.getsockname()[1]),
            "$VICTIM": str(self.victim.pid),
            "$PARENT": str(os.getpid()),
        }
        for name, value in values.items():
            code = code.replace(name, value)
        imports = [
            name for name in MODULES if f"{name}." in code or (name == "ctypes" and "libc." in code)
        ]
        libc = "libc = ctypes.CDLL(None, use_errno=True)\n" if "libc." in code else ""
        return f"import {', '.join(['os', *imports])}\n{libc}{PRELUDE}{code}"

    def attack(self, sandbox, hostile):
        """Run it; the listeners, the victim, the folder and the process table are looked at
        afterwards."""
        result = sandbox.run(
            ["python", "main.py", self.token],
            files={"main.py": self.fill(hostile.code)},
            limits=hostile.limits,
        )
        said = [line for line in result.stdout.splitlines() if line.startswith("ESCAPED")]
        return Outcome(
            ran=result.stdout.startswith("WITNESS"),
            escapes=(*said, *self._seen(sandbox)),
            stop_reason=result.stop_reason,
            seconds=result.seconds,
        )

    def _seen(self, sandbox):
        seen = [f"a connection to {listener.getsockname()!r}" for listener in self._called()]
        if self.victim.poll() is not None:
            seen.append("killed the victim")
            self.victim = self._sleeper()
        for left in set(os.listdir(self.home)) - {"secret", "socket"}:
            seen.append(f"wrote {left}")
            (self.home / left).unlink()
        seen += ["a process that survived"] * len(self.survivors())
        # until they are gone: the next attack is not to be blamed for them
        while left := self.survivors():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        return seen

    def _called(self):
        listeners = [self.tcp, self.udp, self.abstract, self.path]
        called = select.select(listeners, [], [], 0)[0]
        for listener in called:
            if listener.type == socket.SOCK_STREAM:
                listener.accept()[0].close()
            else:
                listener.recv(100)
        return called

    def survivors(self):
        """Processes whose command line has our token: every hostile program's has."""
        found = []
        for name in os.listdir("/proc"):
            with suppress(OSError):
                if (
                    name.isdigit()
                    and self.token.encode() in Path("/proc", name, "cmdline").read_bytes()
                ):
                    found.append(int(name))
        return found
