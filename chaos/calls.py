"""Kills a process at its n-th system call: ptrace stops it at the entry of each, before it happens.

Nothing in the code under test takes part, so this also sees what goes past `tandem.runtime.disk`.
Linux only.
"""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator

_TRACEME, _SYSCALL, _SETOPTIONS = 0, 24, 0x4200
# system calls stop with SIGTRAP | 0x80; the child dies with its tracer
_SYSGOOD, _EXITKILL = 1, 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def deaths_at_calls(action: Callable[[], object], every: int = 1) -> Iterator[int]:
    """Run action in a child again and again, killed later each time, until it ends; the caller
    resets between."""
    n = 0
    while killed_at_call(n, action):
        yield n
        n += every


def killed_at_call(n: int, action: Callable[[], object]) -> bool:
    """Run action in a child and kill that at its call n; False when it returned before."""
    child = os.fork()
    if child == 0:
        _run_traced(action)
    _, status = os.waitpid(child, 0)
    assert os.WIFSTOPPED(status), "this system does not let a process be traced"
    _ptrace(_SETOPTIONS, child, _SYSGOOD | _EXITKILL)
    stops, deliver = 0, 0
    while True:
        _ptrace(_SYSCALL, child, deliver)
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            assert os.waitstatus_to_exitcode(status) == 0, "the action failed by itself"
            return False
        deliver = os.WSTOPSIG(status)
        if deliver == signal.SIGTRAP | 0x80:
            deliver = 0
            if stops == 2 * n:  # a call stops at its entry and at its exit
                os.kill(child, signal.SIGKILL)
                return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            stops += 1


def _run_traced(action: Callable[[], object]) -> None:
    code = 1
    try:
        _ptrace(_TRACEME, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        action()
        code = 0
    finally:
        os._exit(code)


def _ptrace(request: int, pid: int, data: int) -> None:
    if _libc.ptrace(request, pid, None, data) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")
