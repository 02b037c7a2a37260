"""The processes of workers, as a pool holds them: a fork, or a process of this machine. On other
machines they are actors (plugins/cluster/ray_cluster.py).

    pool                                       fork server (fork_server.py)
    LocalHosts.open       starts it once  -->  loads, with signs of life for who waits
                          {"fork": 1}     -->  fork; the worker has its channel, its log
    ForkedProcess.pid                    <--   {"forked": 1, "pid": 4711}
    how_it_ended, end                    <--   {"exited": 1, "status": -9}

Until it is forked a worker's process is the fork server: that one's signals, stack and end are its
own. A fork server that has ended took its workers with it; the next worker starts another one. Does
not know the meaning of messages or the fate of calls.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from tandem.runtime import numerics
from tandem.runtime.place import without_place
from tandem.runtime.processes import kill_group
from tandem.workers.channel import FORK, Channel

HERE = socket.gethostname()
EXIT_S = 5.0  # between the end of a worker's socket, or a SIGKILL, and the end of its process
CHECK_S = 0.05
STACK_S = 0.2  # for a silent worker to write where it is
LOG_BYTES = 1 << 16
LAST_LINES = 6  # of a worker's log, for the error that it causes


class Host(Protocol):
    """The process of a worker, from its start on."""

    node: str  # the machine that it runs on

    @property
    def pid(self) -> int:
        """Its process there; 0: not known yet."""

    def connect(self) -> Channel | None:
        """Return the non-blocking channel to it; None as long as it has not connected. Raises
        EOFError if it never will."""

    def stack(self) -> str:
        """Return a silent worker's stack, innermost call first, if it can tell; then end it."""

    def last_words(self) -> str:
        """Return the last lines that it wrote."""

    def how_it_ended(self) -> str:
        """Describe how it ended, after its connection has."""

    def end(self) -> None:
        """Kill it, and close the channel; once."""


OpenHost = Callable[[int], Host]  # starts the process of the worker of that number


class LocalProcess:
    """A worker's process on this machine, started by its command. Implements Host. log: what it
    writes is kept for `last_words`, else it goes where this process's does.

    Its last argument is this process's id, for `die_with_parent`. It has one torch thread, no place
    among the trainer's processes, and a session of its own: Ctrl-C in the terminal does not reach
    it.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] = {}, log: bool = True
    ):
        self.node, self.log = HERE, open_log(log)
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*command, str(os.getpid())],
                stdin=theirs.fileno(),
                env={**without_place(os.environ), **numerics.environment(), **environment},
                stdout=2,
                stderr=self.log,
                start_new_session=True,
            )
        ours.setblocking(False)
        self.pid, self._channel = self.process.pid, Channel(ours)

    def connect(self) -> Channel:
        return self._channel

    def stack(self) -> str:
        return read_stack(self.pid, self.log)

    def last_words(self) -> str:
        return read_end(self.log)

    def how_it_ended(self) -> str:
        try:
            return describe_exit(self.process.wait(EXIT_S))
        except subprocess.TimeoutExpired:
            return "it closed its socket"

    def kill(self) -> None:
        if self.process.returncode is None:
            kill_group(self.pid)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_S)

    def end(self) -> None:
        self.kill()
        self._channel.close()
        os.close(self.log)


class LocalHosts:
    """Starts the workers of one pool on this machine by their command, forked where the system
    allows it.

    preload: the argument of the fork server's `preload`; None: no worker is forked. log: of
    LocalProcess.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] = {},
        preload: str | None = None,
        log: bool = True,
    ):
        self._command, self._environment, self._log = command, environment, log
        # elsewhere the libraries that torch brings do not survive a fork
        self._preload = preload if sys.platform == "linux" else None
        self._servers: list[ForkServerProcess] = []  # all have ended but the last

    def open(self, number: int) -> Host:
        """Start a worker; the fork server ends with the thread that calls this first."""
        if self._preload is None:
            return LocalProcess(self._command, self._environment, self._log)
        if not self._servers or self._servers[-1].has_ended():
            for server in [one for one in self._servers if not one.num_workers]:
                self._servers.remove(server)
                server.end()
            command = (*self._command, FORK, self._preload)
            self._servers.append(ForkServerProcess(command, self._environment, self._log))
        return self._servers[-1].fork()

    def close(self) -> None:
        """End the fork server, and every worker that is left."""
        while self._servers:
            self._servers.pop().end()


class ForkServerProcess(LocalProcess):
    """The process of fork_server.py, and what it has said. Any thread may ask for that."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: bool):
        super().__init__(command, environment, log)
        self._keeps_log = log
        self._pids: dict[int, int] = {}  # of workers, by their number here
        self._statuses: dict[int, int] = {}
        self._lock = threading.Lock()
        self._ended, self._forks = False, 0
        self.num_workers = 0  # that are not over: each may still ask for its log

    def fork(self) -> "ForkedProcess":
        """Ask for a worker."""
        self._forks += 1
        self.num_workers += 1
        (ours, theirs), log = socket.socketpair(), open_log(self._keeps_log)
        ours.setblocking(False)
        self._channel.send({"fork": self._forks}, os.dup(log), theirs.detach())
        return ForkedProcess(self, self._forks, Channel(ours), log)

    def end(self) -> None:
        """Have it end its workers, and then itself; kill it if it still loads, or does not."""
        self._channel.close()
        if self._pids:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(EXIT_S)
        super().end()

    def has_ended(self) -> bool:
        self._read()
        return self._ended

    def pid_of(self, number: int) -> int:
        """Return a worker's process; 0 as long as it is not forked."""
        self._read()
        return self._pids.get(number, 0)

    def wait_for(self, number: int) -> int | None:
        """Return the exit status of a worker that is about to end; None if it does not, or the fork
        server ends first or says nothing."""
        ends = time.monotonic() + EXIT_S
        while not self.has_ended() and number not in self._statuses and time.monotonic() < ends:
            select.select([self._channel.socket], [], [], CHECK_S)
        return self._statuses.get(number)

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
            except EOFError:  # `end` closes the channel: another thread may be about to send
                self._ended = True


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
        stack = self._server.stack()
        self._server.kill()  # it is what hangs
        return stack

    def last_words(self) -> str:
        forked = self._server.pid_of(self._number)
        return read_end(self._log) if forked else self._server.last_words()

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
        """Kill it and its children, and do not wait: a process that other processes keep from the
        processor is slow to end. One that is not forked yet finds its channel closed, and ends."""
        if (pid := self._server.pid_of(self._number)) and not self._server.has_ended():
            kill_group(pid)
        self._channel.close()
        os.close(self._log)
        self._server.num_workers -= 1


def open_log(kept: bool = True) -> int:
    """Open a file without a name, which goes with its last descriptor; this process's standard
    error if it is not to be kept."""
    if not kept:
        return os.dup(2)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read_stack(pid: int, log: int) -> str:
    """Have a process of this machine write its stack to its log; return that."""
    before = os.fstat(log).st_size
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
    time.sleep(STACK_S)
    lines = (line.strip() for line in _read_log(log, before))
    return "\n".join(line for line in lines if line.startswith("File"))


def read_end(log: int) -> str:
    """Read the last lines of a log."""
    return "\n".join(_read_log(log, max(0, os.fstat(log).st_size - LOG_BYTES))[-LAST_LINES:])


def _read_log(log: int, start: int) -> list[str]:
    with suppress(OSError):  # standard error of a terminal
        return os.pread(log, LOG_BYTES, start).decode(errors="replace").strip().splitlines()
    return []


def describe_exit(status: int) -> str:
    """Say how a worker ended. Example: describe_exit(-9) == "it was ended by SIGKILL" """
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it ended with exit code {status}"
