"""Notes of log.txt on a run: why its last start failed, and the warnings of its steps.

    2026-01-31T12:00:00Z resumed by pid 4711: tandem train
    2026-01-31T12:03:10Z warning at step 12: the reward is falling, 0.61 -> 0.38: ...
    2026-01-31T12:04:02Z failed: the engine cannot be reached

Reads alone, of a run under way too. It does not know what a warning means.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tandem.runtime.errors import InvariantError, UserError

FAILED = "failed: "
LONGEST = 300  # characters of a reason
MOST_WARNINGS = 50
TAIL = 1 << 20  # bytes of a log that are read
_START = re.compile(r"(started|resumed) by pid \d+: ")
_WARNING = re.compile(r"warning[ :]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """Notes of a log. warnings: of all starts, each once, the newest last."""

    failed: str = ""  # the reason, of the last start
    warnings: tuple[str, ...] = ()


def reason_of(error: Exception) -> str:
    """Say in a line why a run failed: the first one of the error."""
    first, kind = next(iter(str(error).splitlines()), ""), type(error).__name__
    is_users = isinstance(error, UserError) and not isinstance(error, InvariantError)
    text = first if is_users else f"{kind}: {first}" if first else kind
    return text[:LONGEST]


def read_notes(folder: Path) -> Notes:
    """Read the end of log.txt; empty notes if there is none."""
    try:
        with (folder / "log.txt").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return Notes()
    failed, warnings = "", dict[str, None]()
    for line in lines:
        text = line.partition(" ")[2]
        if text.startswith(FAILED):
            failed = text.removeprefix(FAILED)
        elif _START.match(text):
            failed = ""
        elif _WARNING.match(text):
            warnings.pop(text, None)
            warnings[text] = None
    return Notes(failed=failed, warnings=tuple(warnings)[-MOST_WARNINGS:])
