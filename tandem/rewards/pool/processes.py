"""The processes of a RewardPool as its thread holds them: one template, and the workers that the
template forks.

It knows how they are started, reached, put behind others and killed; not what they do, nor for how
long (crew.py).
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.rewards.pool.protocol import LINE_BYTES, decode
from tandem.runtime import numerics
from tandem.types import Attempt, Problem, Score

CLOSE_S = 2.0
GROWTH_BYTES = 256 * 2**20
PF_EXITING = 4  # in the flags of proc(5); set before a process closes what it has open


@dataclass(slots=True, eq=False)
class Item:
    """One attempt to score. interrupted: how often it went down with others."""

    index: int
    problem: Problem
    attempt: Attempt
    future: Future[Score] = field(default_factory=Future)
    interrupted: int = 0


@dataclass(slots=True, eq=False)
class Channel:
    """A non-blocking socket of JSON lines."""

    socket: socket.socket
    outgoing: bytearray = field(default_factory=bytearray)
    incoming: bytearray = field(default_factory=bytearray)

    def read(self) -> tuple[list[bytes], bool]:
        """(whole lines that have come, whether more may come)."""
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return [], True
        except ConnectionResetError:
            return [], False
        *lines, rest = (bytes(self.incoming) + data).split(b"\n")
        self.incoming = bytearray(rest)
        return lines, bool(data)

    def write(self) -> None:
        """Send what goes without waiting."""
        # its end also shows in read
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]

    @property
    def flooded(self) -> bool:
        return len(self.incoming) > LINE_BYTES


@dataclass(slots=True, eq=False)
class Worker(Channel):
    """A forked process; unanswered[0] is what it is at."""

    number: int = 0
    pid: int = 0  # 0 until the template has told it
    ready: bool = False
    unanswered: deque[Item] = field(default_factory=deque)
    began: float = 0.0  # monotonic seconds: when unanswered[0] became the oldest
    used: float = 0.0  # processor seconds of the process by then
    looked: float = 0.0  # when it was last asked what it uses
    deadline: float = 0.0  # of unanswered[0], or of becoming ready
    at: int = 0  # the function that scores unanswered[0], or is being loaded
    loading_notes: int = 2  # how many more are believed: the import begins, and has ended
    answered: int = 0
    late: bool = False  # another one has taken over what was behind unanswered[0]
    # late, but it slept: it keeps its place among the workers, and gets no spare
    waits: bool = False
    closed: bool = False  # its socket has ended
    last: bool = False  # it has been put behind all others

    def turn_to_next(self, now: float, timeout_s: float) -> None:
        """The clock of unanswered[0] starts, with the first function."""
        self.at = 0
        self.start_clock(now, timeout_s)

    def start_clock(self, now: float, timeout_s: float) -> None:
        self.began, self.deadline = now, now + timeout_s
        self.used = self._clock()

    def processor_s(self) -> float:
        """Processor seconds at unanswered[0], the processes that it has started not counted."""
        return self._clock() - self.used

    def _clock(self) -> float:
        if sys.platform != "linux" or not self.pid:
            return 0.0
        try:
            return time.clock_gettime(~self.pid << 3 | 2)  # as clock_getcpuclockid(3) makes it
        except OSError:  # it is gone
            return 0.0

    def sleeps(self) -> bool:
        """Whether it waits for something else than a core: a server, a process of its own. Unknown,
        it does not."""
        if sys.platform != "linux" or not self.pid:
            return False
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
        except OSError:  # it is gone
            return False

    def is_ending(self) -> bool:
        """Tell whether it has begun to end, so that news of its exit status will come. True where
        that is not known."""
        if sys.platform != "linux" or not self.pid:
            return True
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it is gone
            return True
        return fields[0] in "ZX" or bool(int(fields[6]) & PF_EXITING)

    def kill(self) -> None:
        if self.pid:
            kill_worker(self.pid)
        self.socket.close()

    def put_last(self) -> None:
        """It gets next to nothing of a core that anybody wants, and takes little more memory, as
        many may be so at once. There is no way back for an unprivileged process."""
        self.last = True
        if sys.platform == "linux":
            with suppress(ProcessLookupError, PermissionError, FileNotFoundError):
                os.sched_setscheduler(
                    self.pid, os.SCHED_IDLE, os.sched_param(0)
                )  # nice 19 keeps a tenth less of a storm
                pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[0])
                limit = pages * os.sysconf("SC_PAGE_SIZE") + GROWTH_BYTES
                hard = resource.prlimit(self.pid, resource.RLIMIT_AS)[1]
                if hard == resource.RLIM_INFINITY or limit < hard:
                    resource.prlimit(self.pid, resource.RLIMIT_AS, (limit, limit))


class Template(Channel):
    """The process of template.py. Make it in a thread that lives as long as it shall live."""

    __slots__ = ("_numbers", "at", "deadline", "process", "ready")

    def __init__(self, arguments: tuple[str, ...], start_s: float):
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = _popen(arguments, theirs)
        super().__init__(ours)
        self.deadline = time.monotonic() + start_s
        self.ready = False
        self.at = 0  # the function that is being loaded
        self._numbers = 0

    def fork(self, start_s: float) -> Worker:
        """Ask for a worker; it says itself when it is ready."""
        ours, theirs = socket.socketpair()
        self._numbers += 1
        with theirs, suppress(BrokenPipeError, ConnectionResetError):  # its end also shows in read
            socket.send_fds(
                self.socket,
                [json.dumps({"fork": self._numbers}).encode() + b"\n"],
                [theirs.fileno()],
            )
        ours.setblocking(False)
        return Worker(ours, number=self._numbers, deadline=time.monotonic() + start_s)

    def preload(self, module: str) -> None:
        """Workers from now on have imported it."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(json.dumps({"import": module}).encode() + b"\n")

    def messages(self) -> tuple[list[dict[str, Any]], bool]:
        """(what it has said, whether it may say more). Call it only when there is something to
        read."""
        lines, alive = self.read()
        return [decode(line) for line in lines], alive

    def close(self) -> int:
        """End it, with its workers; its exit status."""
        self.socket.close()
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(CLOSE_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def kill_worker(pid: int) -> None:
    """And everything that it has started."""
    for kill in (os.killpg, os.kill):  # it has no group of its own in its first microseconds
        # it is gone; macOS says it is not permitted
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _popen(arguments: tuple[str, ...], channel: socket.socket) -> subprocess.Popen[bytes]:
    """The template, in a session of its own: no terminal reaches it and its workers."""
    # One thread each, as the cores belong to engine and trainer; one hash seed, so that sympy
    # orders terms alike.
    return subprocess.Popen(
        [sys.executable, "-m", "tandem.rewards.pool.fork_server", *arguments, str(os.getpid())],
        stdin=channel.fileno(),
        env={**os.environ, **numerics.environment(), "PYTHONHASHSEED": "0"},
        start_new_session=True,
    )
