"""The template process: loads the reward functions once and forks a worker, in milliseconds,
whenever it is asked.

    python -m tandem.rewards.pool.fork_server FUNCTIONS WEIGHTS OPTIONS MEMORY_MB PARENT_PID [LATE]     (process.py starts it)

Standard input is its socket to RewardPool. JSON lines, each fork with the worker's socket attached:

    in   {"fork": 3}                       out  {"forked": 3, "pid": 4711}, and when it has ended, however it did,
                                                {"exited": 3, "status": -9}
    in   {"import": "math_verify"}              workers forked from now on have it
                                           out  {"id": -1, "at": 1}, {"id": -1, "ready": true} or {"id": -1, "failed": ...}
                                                as in wire.py, about the functions

A fork copies no other thread, and two processes cannot share a connection. Where loading the
functions has left either, the template starts itself anew, LATE: it then loads nothing, and every
worker loads the functions for itself.

Linux kills a process when the *thread* that started it ends. So the template dies with RewardPool's
thread, and workers with the template; elsewhere it ends with its standard input. It knows neither
time nor items.
"""

import ctypes
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
import traceback
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from tandem.rewards.load import load_all
from tandem.rewards.parts import as_it_is
from tandem.rewards.pool.protocol import HELLO
from tandem.rewards.pool.worker import Functions, Send, describe, place, serve
from tandem.runtime.processes import descendants, end_descendants
from tandem.runtime.sandbox.runs import adopt_orphans
from tandem.runtime.watchdog import dumps_stacks

_PR_SET_PDEATHSIG = 1


def main(
    functions: str, weights: str, options: str, memory_mb: str, parent: str, late: str = ""
) -> None:
    """Serve until standard input ends."""
    _die_with(int(parent))
    # -m put the working directory first, where a user's file would hide a package
    sys.path.append(sys.path.pop(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform == "linux":
        adopt_orphans()
    control = socket.socket(fileno=os.dup(0))
    _private_streams()
    dumps_stacks()
    _limit(int(memory_mb) * 2**20)
    load = partial(_load, functions, weights, options)
    before = _sockets()
    loaded = None if late else load(partial(_send, control))
    if loaded is not None and (_threads() > 1 or _sockets() > before):
        os.dup2(control.fileno(), 0)
        os.execv(
            sys.executable,
            [sys.executable, "-m", "tandem.rewards.pool.fork_server", *sys.argv[1:], "late"],
        )
    if loaded is not None or late:
        _send(control, {"id": HELLO, "ready": True})
        _Template(control, weights, loaded, load).serve()


class _Template:
    """children: the number of a worker by its process."""

    def __init__(self, control: socket.socket, weights: str, loaded: Functions | None, load: Any):
        self._control, self._load, self._loaded = control, load, loaded
        self._weights = json.loads(weights)
        self._children: dict[int, int] = {}
        self._sockets: deque[int] = deque()  # that came with fork requests
        self._rest = b""
        self._died, self._bell = os.pipe()  # readable when a child has ended
        os.set_blocking(self._died, False)
        os.set_blocking(self._bell, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)

    def serve(self) -> None:
        # a collection would write in, and so copy, every page that is shared with the workers
        gc.freeze()
        with suppress(BrokenPipeError, ConnectionResetError):  # nobody is there to ask any more
            while self._turn():
                pass
        for pid in self._children:
            _kill_group(pid)
            os.waitpid(pid, 0)
        _end_what_is_left()

    def _turn(self) -> bool:
        ready, _, _ = select.select([self._control.fileno(), self._died], [], [])
        if self._died in ready:
            os.read(self._died, 4096)
            self._bury()
        return self._control.fileno() not in ready or self._obey()

    def _obey(self) -> bool:
        """Do what is asked for; false if nobody is there to ask any more."""
        data, sockets, _, _ = socket.recv_fds(self._control, 65536, 16)
        self._sockets.extend(sockets)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            match json.loads(line):
                case {"fork": int(number)}:
                    self._fork(number, self._sockets.popleft())
                case {"import": str(module)}:
                    # ImportError, MemoryError: then workers import it for themselves
                    with suppress(Exception):
                        importlib.import_module(module)
                    gc.freeze()
        return bool(data)

    def _fork(self, number: int, channel: int) -> None:
        template, pid = os.getpid(), os.fork()
        if pid == 0:
            self._work(channel, template)
        os.close(channel)
        self._children[pid] = number
        _send(self._control, {"forked": number, "pid": pid})

    def _work(self, channel: int, template: int) -> NoReturn:
        """The whole life of a worker."""
        try:
            os.setpgid(0, 0)  # what it starts is killed with it
            _die_with(template)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for other in (self._died, self._bell, *self._sockets):
                os.close(other)
            _new_randomness()
            with socket.socket(fileno=channel) as pool:
                self._answer(pool)
        except (BrokenPipeError, ConnectionResetError):  # nobody is there to answer any more
            os._exit(0)
        except BaseException:  # nothing may run the template's code in this process
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _answer(self, pool: socket.socket) -> None:
        send = partial(_send, pool)
        loaded = self._loaded if self._loaded is not None else self._load(send)
        if loaded is None:
            return
        send({"id": HELLO, "ready": True})
        alike = [1.0] * len(loaded) if len(loaded) > 1 else []
        serve(loaded, self._weights or alike, pool.makefile("rb"), send)

    def _bury(self) -> None:
        """Take the exit status of every child that has ended, and kill what it has left."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._children:
                    _kill_group(pid)
                    code = os.waitstatus_to_exitcode(status)
                    _send(self._control, {"exited": self._children.pop(pid), "status": code})


# ---------------------------------------------------------------- a process


def _load(functions: str, weights: str, options: str, send: Send) -> Functions | None:
    """The functions; None, and why in a message, if they cannot be loaded."""
    names = json.loads(functions)
    lone = as_it_is(names, json.loads(weights))
    try:
        return load_all(names, json.loads(options), lambda at: send({"id": HELLO, "at": at}), lone)
    except BaseException as error:  # the user's module may raise anything, SystemExit included
        send({"id": HELLO, "failed": describe(error), "where": place(error)})
        return None


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _private_streams() -> None:
    """Keep our socket to ourselves: a user's print goes to stderr and a user's input() reads
    nothing."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr


def _die_with(parent: int) -> None:
    """Have the kernel kill us when the thread that started us ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _limit(memory_bytes: int) -> None:
    """Bound the address space (Linux honours it) and leave no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _threads() -> int:
    if sys.platform == "linux":
        return len(os.listdir("/proc/self/task"))
    import threading

    return threading.active_count()


def _sockets() -> int:
    """How many connections this process has."""
    count = 0
    for descriptor in os.listdir("/dev/fd"):
        with suppress(OSError):  # the one that listed them is closed again
            count += stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode)
    return count


def _new_randomness() -> None:
    """Python draws anew after a fork; numpy would draw the same in every worker."""
    if "numpy.random" in sys.modules:
        import numpy as np

        np.random.seed()


def _end_what_is_left() -> None:
    """End what workers have started in sessions of its own: Linux gave it to this process when its
    parent ended."""
    while sys.platform == "linux" and descendants(os.getpid()):
        end_descendants(os.getpid())
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _kill_group(pid: int) -> None:
    # it is gone; macOS says it is not permitted
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
