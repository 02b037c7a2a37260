"""Faults for tests of durable writing: a disk that dies at its n-th operation, small and read-only
file systems.

Every fault has a witness (an exit code, an error number), so that a test cannot pass because
nothing happened.
"""

import errno
import os
import resource
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.runtime.disk import Disk

DIED = 9
MODES = ("before", "midway", "power")
FULL = (errno.ENOSPC, errno.EDQUOT)


class FaultyDisk(Disk):
    """Calls strike before operation n (counted from 0) and each one after, with what does a part of
    that operation."""

    def __init__(self, n: int):
        self.left = n
        self.struck = False

    def write(self, path: Path, save: Callable[[Path], None]) -> None:
        def torn() -> None:
            save(path)
            cut(path)

        self._tick(torn)
        super().write(path, save)

    def fsync(self, path: Path) -> None:
        self._tick(lambda: None)
        super().fsync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._tick(lambda: None)
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        def partly() -> None:
            for file in sorted(path.iterdir())[:2] if path.is_dir() else []:
                file.unlink()

        self._tick(partly)
        super().remove(path)

    def strike(self, part: Callable[[], None]) -> None:
        raise NotImplementedError

    def _tick(self, part: Callable[[], None]) -> None:
        self.left -= 1
        if self.left < 0:
            self.struck = True
            self.strike(part)


class DyingDisk(FaultyDisk):
    """Ends the process at operation n: before it, midway in it, or before it with the power: what
    was not fsynced is cut, and new names that were not fsynced in their folder are as they were."""

    def __init__(self, n: int, mode: str):
        super().__init__(n)
        self.mode, self.unsynced, self.renamed = mode, list[Path](), list[tuple[Path, Path]]()

    def write(self, path: Path, save: Callable[[Path], None]) -> None:
        super().write(path, save)
        self.unsynced.append(path)

    def fsync(self, path: Path) -> None:
        super().fsync(path)
        self.unsynced = [other for other in self.unsynced if other != path]
        self.renamed = [
            (source, target) for source, target in self.renamed if target.parent != path
        ]

    def rename(self, source: Path, target: Path) -> None:
        takes_a_new_name = not target.exists()
        super().rename(source, target)
        self.unsynced = [
            target / p.relative_to(source) if p.is_relative_to(source) else p for p in self.unsynced
        ]
        self.renamed += [(source, target)] * takes_a_new_name

    def strike(self, part: Callable[[], None]) -> None:
        if self.mode == "midway":
            part()
        if self.mode == "power":
            self._lose_power()
        os._exit(DIED)

    def _lose_power(self) -> None:
        for path in filter(Path.exists, self.unsynced):
            cut(path)
        for source, target in filter(lambda pair: pair[1].exists(), reversed(self.renamed)):
            target.rename(source)


class RefusingDisk(FaultyDisk):
    """Operation n stops midway with this error number, and so do all after it; a full disk still
    lets files go."""

    def __init__(self, n: int, number: int):
        super().__init__(n)
        self.number = number

    def remove(self, path: Path) -> None:
        if self.number in FULL:
            Disk.remove(self, path)
        else:
            super().remove(path)

    def strike(self, part: Callable[[], None]) -> None:
        part()
        raise OSError(self.number, os.strerror(self.number))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def in_a_fork(action: Callable[[], object]) -> int:
    """The exit code of a child that runs action: 0 when it returns, 1 when it raises, DIED when its
    disk died."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def limit_file_size(size: int) -> None:
    """Only for a child: writing beyond size fails with EFBIG (Python ignores SIGXFSZ)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory where there is one: the order of operations is tested there, not the speed
    of a disk.

    A TMPDIR that was asked for is used: whoever sets it looks there for what was left behind.
    """
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) and "TMPDIR" not in os.environ else None
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[bool]:
    """A tmpfs of this size at path; yields whether this user may mount one."""
    path.mkdir(exist_ok=True)
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True
        ).returncode
        == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", path], check=True)


def make_read_only(path: Path, *, undo: bool = False) -> None:
    subprocess.run(["mount", "-o", f"remount,{'rw' if undo else 'ro'}", path], check=True)
