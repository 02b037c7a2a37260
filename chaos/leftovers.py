"""Finds what a program leaves behind: processes, by a mark in their environment, and shared memory.

It does not know what left it.
"""

from contextlib import suppress
from pathlib import Path

from tandem.runtime.processes import ZOMBIE, Process, descendants

# Prefixes of what Python, torch and this project would put there; others' files come and go.
SHARED_MEMORY, PREFIXES = Path("/dev/shm"), ("psm_", "sem.", "torch_", "tandem")


def processes_with(variable: str) -> list[Process]:
    """List the living processes with this "NAME=value" in their environment."""
    marked = []
    for process in descendants(0):  # 0 is the parent of all
        with suppress(OSError):  # it has ended, or is not ours
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if process.state != ZOMBIE and variable.encode() in environment:
                marked.append(process)
    return marked


def shared_memory() -> set[str]:
    """List the names of shared memory."""
    if not SHARED_MEMORY.is_dir():
        return set()
    return {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(PREFIXES)}
