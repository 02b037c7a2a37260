"""A reward function that does what its completion says: every way a user's function has hurt a run.

Loaded by path in real worker processes; it knows nothing of pytest.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

HELD = []


def score(problem, completion):
    """0.25 for "fine", and harm otherwise."""
    return ACTS[completion](problem)


def _loop(problem):
    while True:
        pass


def _long_c_call(problem):
    return 9**9**9  # one C call that holds the interpreter: no signal handler ever runs


def _exit(problem):
    os._exit(7)


def _segfault(problem):
    os.kill(os.getpid(), signal.SIGSEGV)


def _hold_memory(problem):
    while True:
        HELD.append(bytearray(64 * 2**20))


def _fork(problem):
    """Leave a child that holds our pipes, and die."""
    child = os.fork()
    if child == 0:
        time.sleep(3600)
        os._exit(0)
    Path(problem.metadata["child"]).write_text(str(child))
    os._exit(5)


def _close(problem):
    """Close every descriptor, the one of our answers too, and stay."""
    os.closerange(0, 256)
    time.sleep(3600)


def _print(problem):
    sent = '{"id": 0, "reward": 99.0, "parts": {}, "error": "", "kind": "", "last": false}'
    print(sent, flush=True)
    os.write(1, b"garbage\n")
    return 0.5


def _forge(start):
    """Write an answer of its own into every pipe there is."""
    line = f'{{{start}, "parts": {{}}, "error": "", "kind": "", "last": false}}\n'
    for fd in range(3, 20):
        with suppress(OSError):
            os.write(fd, line.encode())
    time.sleep(60)


def _interrupt(problem):
    os.kill(os.getpid(), signal.SIGINT)
    return 0.75


def _raise_long(problem):
    raise ValueError("x" * 10**6)


def _raise(problem):
    raise ValueError("the user's own mistake")


class _Unreadable(BaseException):
    def __str__(self):
        raise RuntimeError("no text")


def _raise_unreadable(problem):
    raise _Unreadable


def _recurse(problem):
    return _recurse(problem)


ACTS = {
    "fine": lambda problem: 0.25,
    "true": lambda problem: True,
    "float32": lambda problem: np.float32(0.5),
    "parts": lambda problem: {"format": 0.5, "answer": 1.0},
    "total": lambda problem: {"reward": 2.0, "format": 0.5},
    "echo": lambda problem: {"level": problem.metadata["level"], "messages": len(problem.messages)},
    "pid": lambda problem: os.getpid(),
    "loop": _loop,
    "long c call": _long_c_call,
    "exit": _exit,
    "sys.exit": lambda problem: sys.exit(3),
    "segfault": _segfault,
    "allocate": lambda problem: float(len(bytearray(3 * 2**30))),
    "hold memory": _hold_memory,
    "keep 200 MB": lambda problem: len(HELD.append(bytearray(200 * 2**20)) or HELD),
    "fork": _fork,
    "close": _close,
    "print": _print,
    "input": lambda problem: float(input()),
    "forge": lambda problem: _forge('"id": 99999, "reward": 99.0'),
    "forge NaN as 0": lambda problem: _forge('"id": 0, "reward": NaN'),
    "interrupt": _interrupt,
    "kill fork server": lambda problem: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(60),
    "raise": _raise,
    "raise long": _raise_long,
    "raise unreadable": _raise_unreadable,
    "recurse": _recurse,
    "nan": lambda problem: float("nan"),
    "inf part": lambda problem: {"reward": 1.0, "extra": float("inf")},
    "huge int": lambda problem: 10**400,
    "overflow": lambda problem: {"a": 1.7e308, "b": 1.7e308},
    "string": lambda problem: "1.0",
    "none": lambda problem: None,
    "empty dict": lambda problem: {},
    "many parts": lambda problem: {str(i): 0.0 for i in range(100_000)},
    "int keys": lambda problem: {1: 0.5},
}
