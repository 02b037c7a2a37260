"""The fork server of reward workers: loads the reward functions once.

    python -m tandem.rewards.pool.fork_server FUNCTIONS WEIGHTS OPTIONS MEMORY_MB [LAZY] PARENT_PID

processes.py starts it. On its channel there is, beside the messages of runtime/fork_server.py:

    in   {"fork": 3}                 with the worker's socket beside it
         {"import": "math_verify"}   workers forked from now on have it
    out  {"id": -1, "at": 1}, {"id": -1, "ready": true} or {"id": -1, "failed": ...}
                                     as in protocol.py, about the functions

A fork copies no other thread, and two processes cannot share a connection. If loading the functions
has left either, the fork server starts itself anew with LAZY: it then loads nothing, and every
worker loads the functions for itself. It does not know deadlines or tasks.
"""

import gc
import importlib
import json
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from tandem.rewards.load import load_all
from tandem.rewards.parts import as_it_is
from tandem.rewards.pool.protocol import HELLO, MAX_LINE_BYTES
from tandem.rewards.pool.worker import Functions, Send, serve
from tandem.runtime.fork_server import ForkServer, close_input, count_threads
from tandem.runtime.processes import adopt_orphans, descendants, kill_descendants
from tandem.runtime.user_code import describe, user_line
from tandem.runtime.watchdog import dump_stacks_on_signal
from tandem.runtime.worker_channel import Channel, Message, die_with_parent, take_channel

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
    if loaded is not None and (count_threads() > 1 or _count_sockets() > sockets_before):
        os.dup2(control.socket.fileno(), 0)
        module = ("-m", "tandem.rewards.pool.fork_server")
        os.execv(sys.executable, [sys.executable, *module, *sys.argv[1:-1], LAZY, parent])
    if loaded is not None or lazy:
        control.send({"id": HELLO, "ready": True})
        _fork_server(control, json.loads(weights), loaded, load).serve()
        _end_orphans()


def _fork_server(
    control: Channel,
    weights: list[float],
    loaded: Functions | None,
    load: Callable[[Send], Functions | None],
) -> ForkServer:
    """Return the parent of reward workers. loaded: the functions; None if every worker loads
    them."""

    def work(descriptors: list[int]) -> None:
        with (
            suppress(BrokenPipeError, ConnectionResetError),  # RewardPool is gone
            socket.socket(fileno=descriptors[0]) as pool,
        ):
            send = Channel(pool, MAX_LINE_BYTES).send
            functions = loaded if loaded is not None else load(send)
            if functions is None:
                return
            send({"id": HELLO, "ready": True})
            shares = weights or ([1.0] * len(functions) if len(functions) > 1 else [])
            serve(functions, shares, pool.makefile("rb"), send)

    return ForkServer(control, work, handle=_import_ahead)


def _import_ahead(message: Message) -> None:
    """Import a module for the workers to come."""
    # ImportError, MemoryError: then workers import it for themselves
    with suppress(Exception):
        importlib.import_module(message["import"])
    gc.freeze()


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
    close_input()
    os.dup2(2, 1)
    sys.stdout = sys.stderr


def _limit_memory(memory_bytes: int) -> None:
    """Bound the address space (Linux honours it) and leave no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _count_sockets() -> int:
    count = 0
    for descriptor in os.listdir("/dev/fd"):
        with suppress(OSError):  # the one that listed them is closed again
            count += stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode)
    return count


def _end_orphans() -> None:
    """End processes that workers started in sessions of their own; Linux gave them to this process
    when their parents ended."""
    while sys.platform == "linux" and descendants(os.getpid()):
        kill_descendants(os.getpid())
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
