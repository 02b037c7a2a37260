"""Logs of processes on other nodes, in the run folder, which all nodes have at the same path.

A process writes its stdout and stderr into the file itself, so its last words come too, however it
ends. Does not know Ray.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from tandem.runtime.disk import disk_errors

TAIL_BYTES = 1 << 14
BEGIN = "--- a process on "  # the line before its first


class LogFiles:
    """Files of a folder, one for each name."""

    def __init__(self, folder: Path):
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
        self.folder = folder.absolute()

    def begin(self, name: str, node: str) -> str:
        """Begin a new process's part of the file of a name, "trainer rank 1"; return its path."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with suppress(OSError), self.path(name).open("a") as file:  # a full disk: it goes on
            file.write(f"{BEGIN}{node}, {when}\n")
        return str(self.path(name))

    def path(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '_')}.log"

    def last_lines(self, name: str, count: int) -> str:
        """Return what the newest process of that name wrote last; "" for nothing."""
        with suppress(OSError), self.path(name).open("rb") as file:
            file.seek(-min(TAIL_BYTES, self.path(name).stat().st_size), os.SEEK_END)
            _, _, text = file.read().decode(errors="replace").rpartition(BEGIN)
            return "\n".join(text.splitlines()[1:][-count:])
        return ""


def redirect_output(path: str) -> None:
    """Add what this process writes from now on to a file; a node that lacks the run folder leaves
    it to Ray."""
    with suppress(OSError), open(path, "ab") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
