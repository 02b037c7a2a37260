"""A fork server: a process that has loaded what its workers need, and forks one, in milliseconds,
when it is asked to. rewards/pool/fork_server.py and engine/worker_pool/fork_server.py are two.

Standard input is its channel to the pool:

    in   {"fork": 3}                 with the worker's descriptors beside it, or before it
    out  {"forked": 3, "pid": 4711}
         {"exited": 3, "status": -9}

A fork copies no other thread than the one that forks, so a fork server must have no others: no
compute threads, no event loop.

Linux kills a process when the *thread* that started it ends. So the fork server dies with the
pool's thread, and workers with the fork server; elsewhere it ends with its standard input. It knows
neither work nor deadlines.
"""

import gc
import os
import select
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from tandem.runtime.worker_channel import Channel, Message, die_with_parent, kill_group


class ForkServer:
    """The parent of forked workers. work: the whole life of one, given its descriptors; their
    number: `descriptors`. handle: takes the messages that ask for no fork."""

    def __init__(
        self,
        control: Channel,
        work: Callable[[list[int]], None],
        descriptors: int = 1,
        handle: Callable[[Message], None] = lambda message: None,
    ):
        self._control, self._work, self._handle = control, work, handle
        self._num_descriptors = descriptors
        self.asked: deque[tuple[int, list[int]]] = deque()  # forks: number, descriptors
        self.alone = True  # there was one thread at the last fork
        self._workers: dict[int, int] = {}  # number by process id
        self._exits, self._exits_writer = os.pipe()  # readable when a worker has ended
        os.set_blocking(self._exits, False)
        os.set_blocking(self._exits_writer, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._exits_writer, warn_on_full_buffer=False)

    def receive(self) -> None:
        """Take the messages that have arrived. Raises EOFError if the pool is gone."""
        for message in self._control.receive():
            match message:
                case {"fork": int(number)}:
                    count, descriptors = self._num_descriptors, self._control.descriptors
                    self.asked.append((number, [descriptors.popleft() for _ in range(count)]))
                case _:
                    self._handle(message)

    def serve(self) -> None:
        """Serve until the pool is gone; then end all workers."""
        # a collection would write in, and so copy, every page that is shared with the workers
        gc.freeze()
        control = self._control.socket.fileno()
        with suppress(EOFError):
            while True:
                while self.asked:
                    self._fork(*self.asked.popleft())
                ready, _, _ = select.select([control, self._exits], [], [])
                if self._exits in ready:
                    os.read(self._exits, 4096)
                    self._report_exits()
                self.receive()
        for pid in self._workers:
            kill_group(pid)
            os.waitpid(pid, 0)

    def _fork(self, number: int, descriptors: list[int]) -> None:
        self.alone = count_threads() == 1
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            self._run(descriptors, parent)
        with suppress(OSError):  # here too: it may be killed before it has done so itself
            os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        self._workers[pid] = number
        self._control.send({"forked": number, "pid": pid})

    def _run(self, descriptors: list[int], parent: int) -> NoReturn:
        """Run a worker: the whole life of the forked process."""
        status = 1
        try:
            os.setpgid(0, 0)  # its children are killed with it
            die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            others = [one for _, waiting in self.asked for one in waiting]
            for descriptor in (self._exits, self._exits_writer, *others):
                os.close(descriptor)
            _reseed_numpy()
            self._work(descriptors)
            sys.stdout.flush()
            status = 0
        except (Exception, SystemExit):
            traceback.print_exc()
        finally:  # nothing may run the fork server's code in this process
            os._exit(status)

    def _report_exits(self) -> None:
        """Report the exit status of every ended worker, and kill the processes that it left."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self._workers:
                    kill_group(pid)
                    code = os.waitstatus_to_exitcode(status)
                    self._control.send({"exited": self._workers.pop(pid), "status": code})


def close_input() -> None:
    """Keep the channel private: what reads standard input gets nothing."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def count_threads() -> int:
    """Count this process's threads, on Linux those of C libraries too."""
    if sys.platform == "linux":
        return len(os.listdir("/proc/self/task"))
    return threading.active_count()


def _reseed_numpy() -> None:
    """Seed numpy anew, else every fork draws the same numbers; Python does so itself."""
    if "numpy.random" in sys.modules:
        import numpy as np

        np.random.seed()
