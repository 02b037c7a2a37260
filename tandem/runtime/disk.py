"""Durable writing: a kill leaves the whole old file or the whole new one; a full disk is a
UserError.

Checkpoints, journal, metrics and the run folder write through these few operations. It does not
know the contents. Tests hand in a Disk that dies at its n-th operation.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.runtime.errors import UserError

_RESUME = "run the same command again to resume"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: ulimit -f, or a small file system
# what the system's refusal of a path means, and what to do
_CAUSES = {
    **dict.fromkeys(_FULL, ("the disk is full", f"free space; {_RESUME}")),
    **dict.fromkeys(
        (errno.EROFS, errno.EACCES, errno.EPERM),
        ("the disk refuses to be written", f"allow writing; {_RESUME}"),
    ),
    **dict.fromkeys(
        {
            *(errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG),
            *(errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EINVAL),
        },
        ("the path cannot be written", "choose another path"),
    ),
    errno.EIO: ("the disk fails", f"check the disk; {_RESUME}"),
}


class Disk:
    """The durable operations; a kill can fall between any two."""

    def write(self, path: Path, save: Callable[[Path], object]) -> None:
        """Let `save` make the file."""
        save(path)

    def fsync(self, path: Path) -> None:
        """Wait until the file, or the entries of the folder, are on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename atomically, over a target that is a file or an empty folder."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with its contents, in part if a kill interrupts."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


DISK = Disk()


def file_hash(path: Path) -> str:
    """Compute the SHA-256, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(folder: Path, disk: Disk = DISK) -> None:
    """Make a folder and its missing parents, each durable in its own parent."""
    if not folder.is_dir():
        make_folder(folder.parent, disk)
        folder.mkdir(exist_ok=True)
        disk.fsync(folder.parent)


def write_atomic(path: Path, data: bytes, disk: Disk = DISK) -> None:
    """Replace the content of path by data, durably and at once. Raises UserError on a full disk."""
    temporary = path.with_name(f".tmp-{path.name}")
    with disk_errors(path):
        disk.write(temporary, lambda target: target.write_bytes(data))
        disk.fsync(temporary)
        disk.rename(temporary, path)
        disk.fsync(path.parent)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill, which then takes the place of `folder`: nothing is seen of a half
    one. Raises UserError on a full disk."""
    unfinished, aside = (folder.with_name(f".{kind}-{folder.name}") for kind in ("tmp", "old"))
    with disk_errors(folder):
        DISK.remove(unfinished)  # of a killed start
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
        except Exception:
            DISK.remove(unfinished)
            raise
        if folder.exists():  # else a killed start may have left the only whole copy aside
            DISK.remove(aside)
            DISK.rename(folder, aside)
        DISK.rename(unfinished, folder)
        DISK.remove(aside)


def append_line(path: Path, line: bytes) -> None:
    """Append one line durably to a file, made if need be. Raises UserError on a full disk."""
    with disk_errors(path), path.open("ab", buffering=0) as file:
        rest = memoryview(line)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an operating system's refusal to write at path into a UserError; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _CAUSES:
            raise
        what, advice = _CAUSES[error.errno]
        free = f"; {human_bytes(shutil.disk_usage(existing_parent(path)).free)} free"
        raise UserError(
            what,
            where=str(path if error.filename is None else error.filename),
            found=f"{error.strerror}{free if error.errno in _FULL else ''}",
            next=advice,
        ) from error


def os_error(error: Exception, path: Path) -> OSError | None:
    """Parse the system's error from the text of a Rust library's: "(os error 28)"."""
    match = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(match[1]), os.strerror(int(match[1])), str(path)) if match else None


def existing_parent(path: Path) -> Path:
    """Find the nearest existing folder: the path itself, or one above it."""
    path = path.absolute()
    # Path.is_dir raises for a name that is too long
    while not os.path.isdir(path) and path != path.parent:
        path = path.parent
    return path


def human_bytes(count: int) -> str:
    """Format a size: 1536 is "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSONL, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode())
