"""The fork server: loads the reward functions once and forks a worker, in milliseconds, when it is
asked to.

    python -m tandem.rewards.pool.fork_server FUNCTIONS WEIGHTS OPTIONS MEMORY_MB [LAZY] PARENT_PID

Standard input is its channel to RewardPool (processes.py starts it):

    in   {"fork": 3}                 with the worker's socket beside it
    out  {"forked": 3, "pid": 4711}
         {"exited": 3, "status": -9}
    in   {"import": "math_verify"}   workers forked from now on have it
    out  {"id": -1, "at": 1}, {"id": -1, "ready": true} or {"id": -1, "failed": ...}
                                     as in protocol.py, about the functions

A fork copies no other thread, and two processes cannot share a connection. If loading the functions
has left either, the fork server starts itself anew with LAZY: it then loads nothing, and every
worker loads the functions for itself.

Linux kills a process when the *thread* that started it ends. So the fork server dies with
RewardPool's thread, and workers with the fork server; elsewhere it ends with its standard input. It
does not know deadlines or tasks.
"""

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn

from tandem.rewards.load import load_all
from tandem.rewards.parts import as_it_is
from tandem.rewards.pool.protocol import HELLO, MAX_LINE_BYTES
from tandem.rewards.pool.worker import Functions, Send, serve
from tandem.runtime.processes import descendants, kill_descendants
from tandem.runtime.sandbox.run import adopt_orphans
from tandem.runtime.user_code import describe, user_line
from tandem.runtime.watchdog import dump_stacks_on_signal
from tandem.runtime.worker_channel import Channel, die_with_parent, kill_group, take_channel

LAZY = "lazy"


def main(functions: str, weights: str, options: str, memory_mb: str, *rest: str) -> None:
    """Serve until standard input ends."""
    *lazy, parent = rest
    die_with_parent(int(parent))
    # -m put the working directory first, where a user's file would hide a package
    sys.path.append(sys.path.pop(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform == "linux":
        adopt_orphans()
    control = take_channel(MAX_LINE_BYTES)
    _redirect_streams()
    dump_stacks_on_signal()
    _limit_memory(int(memory_mb) * 2**20)
    load = partial(_load, functions, weights, options)
    sockets_before = _count_sockets()
    loaded = None if lazy else load(control.send)
    if loaded is not None and (_count_threads() > 1 or _count_sockets() > sockets_before):
        os.dup2(control.socket.fileno(), 0)
        module = ("-m", "tandem.rewards.pool.fork_server")
        os.execv(sys.executable, [sys.executable, *module, *sys.argv[1:-1], LAZY, parent])
    if loaded is not None or lazy:
        control.send({"id": HELLO, "ready": True})
        _ForkServer(control, json.loads(weights), loaded, load).serve()


class _ForkServer:
    """The parent of forked workers. loaded: the functions; None if every worker loads them."""

    def __init__(
        self,
        control: Channel,
        weights: list[float],
        loaded: Functions | None,
        load: Callable[[Send], Functions | None],
    ):
        self._control, self._weights, self._loaded, self._load = control, weights, loaded, load
        self._workers: dict[int, int] = {}  # number by process id
        self._exits, self._exits_writer = os.pipe()  # readable when a worker has ended
        os.set_blocking(self._exits, False)
        os.set_blocking(self._exits_writer, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._exits_writer, warn_on_full_buffer=False)

    def serve(self) -> None:
        # a collection would write in, and so copy, every page that is shared with the workers
        gc.freeze()
        control = self._control.socket.fileno()
        with suppress(EOFError):  # RewardPool is gone
            while True:
                ready, _, _ = select.select([control, self._exits], [], [])
                if self._exits in ready:
                    os.read(self._exits, 4096)
                    self._report_exits()
                for message in self._control.receive():
                    self._handle(message)
        for pid in self._workers:
            kill_group(pid)
            os.waitpid(pid, 0)
        _end_orphans()

    def _handle(self, message: dict[str, object]) -> None:
        match message:
            case {"fork": int(number)}:
                self._fork(number, self._control.descriptors.popleft())
            case {"import": str(module)}:
                # ImportError, MemoryError: then workers import it for themselves
                with suppress(Exception):
                    importlib.import_module(module)
                gc.freeze()

    def _fork(self, number: int, channel: int) -> None:
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            self._work(channel, parent)
        with suppress(OSError):  # here too: it may be killed before it has done so itself
            os.setpgid(pid, pid)
        os.close(channel)
        self._workers[pid] = number
        self._control.send({"forked": number, "pid": pid})

    def _work(self, channel: int, parent: int) -> NoReturn:
        """Run a worker: the whole life of the forked process."""
        try:
            os.setpgid(0, 0)  # its children are killed with it
            die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            os.close(self._exits)
            os.close(self._exits_writer)
            _reseed_numpy()
            with socket.socket(fileno=channel) as pool:
                self._serve_pool(pool)
        except (BrokenPipeError, ConnectionResetError):  # RewardPool is gone
            os._exit(0)
        except BaseException:  # nothing may run the fork server's code in this process
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _serve_pool(self, pool: socket.socket) -> None:
        send = Channel(pool, MAX_LINE_BYTES).send
        loaded = self._loaded if self._loaded is not None else self._load(send)
        if loaded is None:
            return
        send({"id": HELLO, "ready": True})
        weights = self._weights or ([1.0] * len(loaded) if len(loaded) > 1 else [])
        serve(loaded, weights, pool.makefile("rb"), send)

    def _report_exits(self) -> None:
        """Report the exit status of every ended worker, and kill the processes that it left."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self._workers:
                    kill_group(pid)
                    code = os.waitstatus_to_exitcode(status)
                    self._control.send({"exited": self._workers.pop(pid), "status": code})


def _load(functions: str, weights: str, options: str, send: Send) -> Functions | None:
    """Load the functions; if that fails, send why and return None."""
    names = json.loads(functions)
    lone = as_it_is(names, json.loads(weights))
    try:
        return load_all(names, json.loads(options), lambda at: send({"id": HELLO, "at": at}), lone)
    except BaseException as error:  # the user's module may raise anything, SystemExit included
        send({"id": HELLO, "failed": describe(error), "where": user_line(error)})
        return None


def _redirect_streams() -> None:
    """Keep the channel private: a user's print goes to stderr and a user's input() reads
    nothing."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr


def _limit_memory(memory_bytes: int) -> None:
    """Bound the address space (Linux honours it) and leave no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _count_threads() -> int:
    """Count this process's threads, on Linux those of C libraries too."""
    if sys.platform == "linux":
        return len(os.listdir("/proc/self/task"))
    return threading.active_count()


def _count_sockets() -> int:
    count = 0
    for descriptor in os.listdir("/dev/fd"):
        with suppress(OSError):  # the one that listed them is closed again
            count += stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode)
    return count


def _reseed_numpy() -> None:
    """Seed numpy anew, else every fork draws the same numbers; Python does so itself."""
    if "numpy.random" in sys.modules:
        import numpy as np

        np.random.seed()


def _end_orphans() -> None:
    """End processes that workers started in sessions of their own; Linux gave them to this process
    when their parents ended."""
    while sys.platform == "linux" and descendants(os.getpid()):
        kill_descendants(os.getpid())
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
