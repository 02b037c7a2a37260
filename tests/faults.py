"""Faults for tests of durable writing: a disk that dies at its n-th operation, small and read-only file systems.

Every fault has a witness (an exit code, an error number), so that a test cannot pass because nothing happened.
"""

import os
import resource
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tandem.disk import Disk

DIED = 9
MODES = ("before", "midway", "power")


class DyingDisk(Disk):
    """Ends the process at operation n: before it, midway in it, or before it with all that was not fsynced cut."""

    def __init__(self, n: int, mode: str):
        self.left, self.mode, self.unsynced = n, mode, list[Path]()

    def write(self, path: Path, save: Callable[[Path], None]) -> None:
        def torn() -> None:
            save(path)
            cut(path)

        self._tick(torn)
        save(path)
        self.unsynced.append(path)

    def fsync(self, path: Path) -> None:
        self._tick()
        super().fsync(path)
        self.unsynced = [other for other in self.unsynced if other != path]

    def rename(self, source: Path, target: Path) -> None:
        self._tick()
        super().rename(source, target)
        self.unsynced = [target / p.relative_to(source) if p.is_relative_to(source) else p for p in self.unsynced]

    def remove(self, path: Path) -> None:
        def partly() -> None:
            for file in sorted(path.iterdir())[:2] if path.is_dir() else []:
                file.unlink()

        self._tick(partly)
        super().remove(path)

    def _tick(self, part: Callable[[], None] = lambda: None) -> None:
        self.left -= 1
        if self.left >= 0:
            return
        if self.mode == "midway":
            part()
        if self.mode == "power":
            for path in filter(Path.exists, self.unsynced):
                cut(path)
        os._exit(DIED)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def in_a_fork(action: Callable[[], object]) -> int:
    """The exit code of a child that runs action: 0 when it returns, 1 when it raises, DIED when its disk died."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def deaths(action: Callable[[Disk], object], mode: str) -> Iterator[int]:
    """Run action again and again, dying one operation later each time, until it ends; the caller resets between."""
    n = 0
    while (code := in_a_fork(partial(action, DyingDisk(n, mode)))) == DIED:
        yield n
        n += 1
    assert code == 0


def limit_file_size(size: int) -> None:
    """Only for a child: writing beyond size fails with EFBIG (Python ignores SIGXFSZ)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory where there is one: the order of operations is tested there, not the speed of a disk."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[bool]:
    """A tmpfs of this size at path; yields whether this user may mount one."""
    path.mkdir()
    mounted = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True).returncode
        == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", path], check=True)


def make_read_only(path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", path], check=True)
