"""The processes of a RewardPool, as its scheduler holds them: one fork server, and the workers that
it forks.

Knows how they are started, reached and killed, not their tasks or deadlines.
"""

import math
import os
import socket
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tandem.rewards.pool.protocol import MAX_LINE_BYTES
from tandem.runtime.worker_channel import Channel, kill_group, spawn
from tandem.types import Attempt, Problem, Score

COMMAND = (sys.executable, "-m", "tandem.rewards.pool.fork_server")
CLOSE_S = 2.0
_PF_EXITING = 4  # in the flags of proc(5); set before a process closes what it has open


@dataclass(slots=True, eq=False)
class ScoringTask:
    """One attempt to score. interrupted: how often the fork server died under it."""

    index: int
    problem: Problem
    attempt: Attempt
    future: Future[Score] = field(default_factory=Future)
    interrupted: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Worker:
    """A forked process; tasks[0] is in flight, the ones behind it were sent ahead."""

    number: int
    channel: Channel
    deadline: float  # clock seconds: for becoming ready, then of tasks[0]; inf while idle
    pid: int = 0  # 0 until the fork server has said it
    ready: bool = False
    tasks: deque[ScoringTask] = field(default_factory=deque)
    function: int = 0  # index of the one that scores tasks[0], or is being loaded
    loading_notes: int = 2  # how many more are believed: an import begins, and has ended
    used_before: float = 0.0  # processor seconds of the process before tasks[0]
    last_task: bool = False  # it ends after tasks[0]; what was sent behind it went to others
    straggler: bool = False  # its last task takes long, and a spare works
    deprioritized: bool = False
    closed: bool = False  # its socket has ended
    dropped: bool = False  # another one takes its place

    def start_task(self, now: float, timeout_s: float) -> None:
        """Start the clock of tasks[0], if there is one."""
        self.function = 0
        self.deadline = now + timeout_s if self.tasks else math.inf
        self.used_before = self._processor_clock()

    def start_loading(self, now: float, timeout_s: float) -> None:
        """Allow for an import in tasks[0] that does not count as its processor time."""
        self.deadline, self.used_before = now + timeout_s, math.inf

    def end_loading(self, now: float, timeout_s: float) -> None:
        self.deadline, self.used_before = now + timeout_s, self._processor_clock()

    def processor_s(self) -> float:
        """Return the processor seconds of tasks[0], without its child processes; 0 if unknown."""
        return self._processor_clock() - self.used_before

    def _processor_clock(self) -> float:
        if sys.platform != "linux" or not self.pid:
            return 0.0
        try:
            return time.clock_gettime(~self.pid << 3 | 2)  # as clock_getcpuclockid(3) makes it
        except OSError:  # it is gone
            return 0.0

    def deprioritize(self) -> None:
        """Let the process run only on an otherwise idle core. Irreversible without privileges."""
        self.deprioritized = True
        if sys.platform == "linux":
            with suppress(ProcessLookupError, PermissionError):
                os.sched_setscheduler(self.pid, os.SCHED_IDLE, os.sched_param(0))

    def is_exiting(self) -> bool:
        """Tell whether the process has begun to exit and its status will be reported. True if
        unknown."""
        if sys.platform != "linux" or not self.pid:
            return True
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it is gone
            return True
        return fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.pid:
            kill_group(self.pid)
        self.channel.close()


class ForkServer:
    """The process of fork_server.py; on Linux it ends with the thread that started it."""

    def __init__(self, arguments: tuple[str, ...], deadline: float):
        self.process, self.channel = spawn(
            (*COMMAND, *arguments), MAX_LINE_BYTES, {"PYTHONHASHSEED": "0"}
        )  # one hash seed: sympy then orders terms alike
        self.deadline = deadline  # clock seconds, for becoming ready; inf afterwards
        self.ready = False
        self.function = 0  # index of the one that is being loaded
        self._forks = 0

    def fork(self, deadline: float) -> Worker:
        """Ask for a worker, which itself reports that it is ready."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._forks += 1
        self.channel.send({"fork": self._forks}, theirs.detach())
        return Worker(number=self._forks, channel=Channel(ours, MAX_LINE_BYTES), deadline=deadline)

    def preload(self, module: str) -> None:
        """Import a module for the workers forked from now on."""
        self.channel.send({"import": module})

    def close(self) -> int:
        """End the fork server and its workers; return its exit status."""
        self.channel.close()
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(CLOSE_S)
        kill_group(self.process.pid)
        return self.process.wait()
