"""The beginning of a worker: as a process of its own, or forked, in milliseconds, by a fork server,
which has loaded all that workers need.

    PROGRAM ARGUMENTS PARENT_PID < SOCKET                a worker
    PROGRAM ARGUMENTS fork PRELOAD PARENT_PID < SOCKET   a fork server

A program calls `start`. Standard input is the channel to the pool (host.py); that of a fork server:

    in   {"fork": 3}    with the worker's log and its channel beside it
    out  {"forked": 3, "pid": 4711}
         {"exited": 3, "status": -9}

A fork copies no other thread than the one that forks, so a fork server loads and computes nothing
that starts threads: OpenMP's or oneDNN's would be lost. If it has a second thread all the same, a
fork starts its program anew. Linux kills a process when the *thread* that started it ends. So the
fork server dies with the pool's thread, and workers with the fork server; elsewhere it ends with
its standard input. It knows neither work nor deadlines.
"""

import ctypes
import faulthandler
import gc
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from tandem.runtime.processes import kill_group
from tandem.workers.channel import FORK, Channel, encode, take_channel

_PR_SET_PDEATHSIG = 1
LONG_CALL_S = 600.0  # after which a long call gives no more signs of life
BEAT_S = 0.2  # between those of workers that the fork server will fork
THREAD_END_S = 0.5  # between the end of a thread's function and its own

Serve = Callable[[Channel, Any], None]


def start(serve: Serve, preload: Callable[[str], Any] = lambda argument: None) -> None:
    """Be what the arguments of this process ask for: a worker, or the fork server of workers.

    serve: the life of a worker, given what `preload` returned; None if nothing is loaded ahead.
    preload: loads what workers need, as its argument says; starts no thread.
    """
    channel = prepare(int(sys.argv[-1]))
    if FORK in sys.argv[-3:-2]:
        close_input()
        ForkServer(channel, serve).run(lambda: preload(sys.argv[-2]))
    else:
        serve(channel, None)


def prepare(parent: int) -> Channel:
    """Make this process a worker of `parent`; return its channel. Ctrl-C in the terminal does not
    end it."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=1, all_threads=True)  # for the watchdog's report
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)  # for LocalProcess.stack
    return take_channel()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def die_with_starter() -> None:
    """Have the kernel kill this process when its parent ends, whichever that is by now."""
    die_with_parent(os.getppid())


def close_input() -> None:
    """Keep the channel private: what reads standard input gets nothing."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


@contextmanager
def repeated(action: Callable[[], None], every_s: float) -> Iterator[None]:
    """Do something again and again in another thread while this one is in a long call."""
    over = threading.Event()

    def repeat() -> None:
        ends = time.monotonic() + LONG_CALL_S
        while not over.wait(every_s) and time.monotonic() < ends:
            action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class ForkServer:
    """The parent of forked workers. serve: the whole life of one."""

    def __init__(self, control: Channel, serve: Serve):
        self._control, self._serve, self._loaded = control, serve, None
        self._asked: deque[tuple[int, list[int]]] = deque()  # number; its log, its channel
        self._workers: dict[int, int] = {}  # number by process id
        self._exits, self._exits_writer = os.pipe()  # readable when a worker has ended
        os.set_blocking(self._exits, False)
        os.set_blocking(self._exits_writer, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._exits_writer, warn_on_full_buffer=False)

    def run(self, preload: Callable[[], Any]) -> None:
        """Load, with a sign of life in the name of each worker that waits; then serve until the
        pool is gone, and end all workers."""
        # an error is the worker's to report, which loads the rest for itself
        with repeated(self._show_life, BEAT_S), suppress(Exception, SystemExit):
            self._loaded = preload()
        ends = time.monotonic() + THREAD_END_S
        while _count_threads() > 1 and time.monotonic() < ends:
            time.sleep(0.001)
        # a collection would write in, and so copy, every page that is shared with the workers
        gc.freeze()
        with suppress(EOFError):
            while True:
                while self._asked:
                    self._fork(*self._asked.popleft())
                ready, _, _ = select.select([self._control.socket.fileno(), self._exits], [], [])
                if self._exits in ready:
                    os.read(self._exits, 4096)
                    self._report_exits()
                self._receive()
        for pid in self._workers:
            kill_group(pid)
            os.waitpid(pid, 0)

    def _show_life(self) -> None:
        with suppress(EOFError):
            self._receive()
        for _, (_, channel) in self._asked:
            with suppress(ConnectionError):
                os.write(channel, encode({"alive": True}))

    def _receive(self) -> None:
        """Take the messages that have arrived. Raises EOFError if the pool is gone."""
        for message in self._control.receive():
            beside = self._control.descriptors
            self._asked.append((message["fork"], [beside.popleft() for _ in range(2)]))

    def _fork(self, number: int, descriptors: list[int]) -> None:
        alone, parent, pid = _count_threads() == 1, os.getpid(), os.fork()
        if pid == 0:
            self._work(descriptors, parent, alone)
        with suppress(OSError):  # here too: it may be killed before it has done so itself
            os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        self._workers[pid] = number
        self._control.send({"forked": number, "pid": pid})

    def _work(self, descriptors: list[int], parent: int, alone: bool) -> NoReturn:
        """Be a worker: the whole life of the forked process. alone: the fork server had one
        thread."""
        status = 1
        try:
            os.setpgid(0, 0)  # its children are killed with it
            die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for place, descriptor in zip((2, 0), descriptors, strict=True):
                os.dup2(descriptor, place)
            others = [one for _, waiting in self._asked for one in waiting]
            for descriptor in (self._exits, self._exits_writer, *descriptors, *others):
                os.close(descriptor)
            if not alone:
                program = sys.orig_argv[1:-3]
                os.execv(sys.executable, [sys.executable, *program, str(parent)])
            self._serve(prepare(parent), self._loaded)
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


def _count_threads() -> int:
    """Count this process's threads, on Linux those of C libraries too."""
    if sys.platform == "linux":
        return len(os.listdir("/proc/self/task"))
    return threading.active_count()
