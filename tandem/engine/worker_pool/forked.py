"""Rollout workers of this machine, as the pool holds them: forked by a fork server where the system
allows it, so that they start in well under a second.

    pool                                       fork server (fork_server.py)
    LocalProcesses.spawn  starts it once  -->  imports, with signs of life for who waits
                          {"fork": 1}     -->  fork; the worker has its channel, its log
    ForkedProcess.pid                    <--   {"forked": 1, "pid": 4711}
    how_it_ended, end                    <--   {"exited": 1, "status": -9}

Until it is forked a worker's process is the fork server: that one's signals, stack and end are its
own. A fork server that has ended took its workers with it; the next worker starts another one.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from tandem.engine.worker_pool.fork_server import FORK
from tandem.engine.worker_pool.process import (
    ENVIRONMENT,
    EXIT_S,
    HERE,
    Host,
    LocalProcess,
    describe_exit,
    open_log,
    read_end,
    read_stack,
)
from tandem.engine.worker_pool.protocol import MAX_LINE_BYTES
from tandem.runtime.processes import ZOMBIE, state_of
from tandem.runtime.worker_channel import Channel, spawn

CHECK_S = 0.05
REPORT_S = 1.0  # between the end of a worker and its exit status, if the fork server is well


class LocalProcesses:
    """Starts the workers of one pool on this machine by their command.

    model_path: what they will load. forks: the command's program is one of fork_server.start.
    """

    def __init__(self, command: Sequence[str], model_path: str, forks: bool):
        self._command, self._model_path = command, model_path
        # elsewhere the libraries that torch brings do not survive a fork
        self._forks = forks and sys.platform == "linux"
        self._servers: list[ForkServerProcess] = []  # all have ended but the last

    def spawn(self, number: int) -> Host:
        """Start a worker; the fork server ends with the thread that calls this first."""
        if not self._forks:
            return LocalProcess(self._command)
        if not self._servers or self._servers[-1].has_ended():
            for server in [one for one in self._servers if not one.num_workers]:
                self._servers.remove(server)
                server.close()
            self._servers.append(ForkServerProcess((*self._command, FORK, self._model_path)))
        return self._servers[-1].fork()

    def close(self) -> None:
        """End the fork server, and every worker that is left."""
        while self._servers:
            self._servers.pop().close()


class ForkServerProcess:
    """The process of fork_server.py, and what it has said. Any thread may ask for that."""

    def __init__(self, command: Sequence[str]):
        self.log = open_log()
        self._process, self._channel = spawn(
            command, MAX_LINE_BYTES, ENVIRONMENT, stdout=2, stderr=self.log
        )
        self.pid = self._process.pid
        self._pids: dict[int, int] = {}  # of workers, by their number here
        self._statuses: dict[int, int] = {}
        self._lock = threading.Lock()
        self._ended, self._forks = False, 0
        self.num_workers = 0  # that are not over: each may still ask for its log

    def fork(self) -> "ForkedProcess":
        """Ask for a worker."""
        self._forks += 1
        self.num_workers += 1
        (ours, theirs), log = socket.socketpair(), open_log()
        ours.setblocking(False)
        # one descriptor goes beside each message; the fork takes both
        self._channel.send({"log": self._forks}, os.dup(log))
        self._channel.send({"fork": self._forks}, theirs.detach())
        return ForkedProcess(self, self._forks, Channel(ours, MAX_LINE_BYTES), log)

    def has_ended(self) -> bool:
        self._read()
        return self._ended

    def pid_of(self, number: int) -> int:
        """Return a worker's process; 0 as long as it is not forked."""
        self._read()
        return self._pids.get(number, 0)

    def wait_for(self, number: int) -> int | None:
        """Return the exit status of a worker that is about to end; None if the fork server ends
        first, or says nothing."""
        ends = time.monotonic() + EXIT_S
        while not self.has_ended() and number not in self._statuses and time.monotonic() < ends:
            select.select([self._channel.socket], [], [], CHECK_S)
            if state_of(self._pids.get(number, 0)) == ZOMBIE:
                ends = min(ends, time.monotonic() + REPORT_S)
        return self._statuses.get(number)

    def how_it_ended(self) -> str:
        try:
            return describe_exit(self._process.wait(EXIT_S))
        except subprocess.TimeoutExpired:
            return "it closed its socket"

    def kill(self) -> None:
        """Kill it; its workers end with it."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)

    def close(self) -> None:
        self.kill()
        self._channel.close()
        os.close(self.log)

    def _read(self) -> None:
        """Take what it has said since."""
        with self._lock:
            try:
                for message in () if self._ended else self._channel.receive():
                    match message:
                        case {"forked": int(number), "pid": int(pid)}:
                            self._pids[number] = pid
                        case {"exited": int(number), "status": int(status)}:
                            self._statuses[number] = status
            except EOFError:
                self._ended = True
                self._channel.close()


class ForkedProcess:
    """A worker forked on this machine. Implements Host."""

    def __init__(self, server: ForkServerProcess, number: int, channel: Channel, log: int):
        self.node = HERE
        self._server, self._number, self._channel, self._log = server, number, channel, log

    @property
    def pid(self) -> int:
        return self._server.pid_of(self._number) or self._server.pid

    def connect(self) -> Channel:
        if not self._server.pid_of(self._number) and self._server.has_ended():
            raise EOFError
        return self._channel

    def stack(self) -> str:
        if pid := self._server.pid_of(self._number):
            return read_stack(pid, self._log)
        stack = read_stack(self._server.pid, self._server.log)
        self._server.kill()  # it is what hangs
        return stack

    def last_words(self) -> str:
        forked = self._server.pid_of(self._number)
        return read_end(self._log if forked else self._server.log)

    def how_it_ended(self) -> str:
        status = self._server.wait_for(self._number)
        if status is not None:
            return describe_exit(status)
        if not self._server.has_ended():
            return "it closed its socket"
        if not self._server.pid_of(self._number):
            return self._server.how_it_ended()
        server = f"process {self._server.pid}, which had forked it"
        return f"{server}, ended first: {self._server.how_it_ended()}"

    def end(self) -> None:
        """Kill it. One that is not forked yet finds its channel closed, and ends."""
        if pid := self._server.pid_of(self._number):
            with suppress(ProcessLookupError):
                if not self._server.has_ended():
                    os.kill(pid, signal.SIGKILL)
            self._server.wait_for(self._number)
        self._channel.close()
        os.close(self._log)
        self._server.num_workers -= 1
