"""The lock of a run folder: one process at a time has it, and a kill lets go of it.

An exclusive flock on `lock`, whose text names the holder (pid, machine, since when). It does not
know what the folder is for.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from tandem.run_folder.files import OTHER_FOLDER
from tandem.runtime.disk import disk_errors
from tandem.runtime.errors import UserError

_open_locks: set[int] = set()


@contextmanager
def locked(folder: Path) -> Iterator[str]:
    """Hold the lock; yield news of a holder that was killed, or "". Creates the folder. Raises
    UserError if another process has it."""
    descriptor = _acquire(folder)
    _open_locks.add(descriptor)
    _close_in_forks()
    try:
        killed = _holder(descriptor)
        with disk_errors(folder / "lock"):
            os.ftruncate(descriptor, 0)
            text = f"pid {os.getpid()} on {socket.gethostname()} since {now()}\n"
            os.pwrite(descriptor, text.encode(), 0)
        yield f"took over the lock of a run that was killed: {killed}" if killed else ""
    finally:
        with suppress(OSError):
            # an empty lock tells the next start that this one was not killed
            os.ftruncate(descriptor, 0)
        _open_locks.discard(descriptor)
        os.close(descriptor)


def check_unlocked(folder: Path) -> None:
    """Check that no process has the lock, and change nothing. Raises UserError."""
    if (folder / "lock").is_file():
        with (folder / "lock").open() as lock:
            _flock(lock.fileno(), folder)


def holder(folder: Path) -> str:
    """Return who has the lock, as "pid 4711 on HOST since TIME", or "" if nobody has."""
    if (folder / "lock").is_file():
        with (folder / "lock").open() as lock:
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _holder(lock.fileno()) or "a process that is just starting"
    return ""


def now() -> str:
    """Return the time, as "2026-01-31T12:00:00Z"."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _acquire(folder: Path) -> int:
    path = folder / "lock"
    while True:
        with disk_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _flock(descriptor, folder)
        except UserError:
            os.close(descriptor)
            raise
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.lstat()):
            return descriptor
        os.close(descriptor)  # between open and flock a --fresh run moved the folder away


def _flock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            "the run folder is in use",
            where=str(folder),
            found=_holder(descriptor) or "a process that is just starting",
            expected="no other run in this folder",
            next=f"wait for it or stop it, or {OTHER_FOLDER}",
        ) from None


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 4096, 0).decode(errors="replace").strip()


@cache
def _close_in_forks() -> None:
    """Let forked workers close their copies: they would keep a lock after the run is killed."""

    def close() -> None:
        while _open_locks:
            os.close(_open_locks.pop())

    os.register_at_fork(after_in_child=close)
