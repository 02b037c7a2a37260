"""Words of lines that people read."""

import difflib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def counted(number: int, units: str) -> str:
    """Write how many there are of something.

    Example: counted(1, "problems") is "1 problem", and counted(1200, "problems") "1,200 problems".
    """
    return f"{number:,} {units.removesuffix('s') if number == 1 else units}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Ask whether the known name most like a misspelt one was meant; "" if none is like it."""
    near = difflib.get_close_matches(name.lower(), list(known), 1, 0.5)
    return f"did you mean {near[0]}?" if near else ""


def look_for(path: Path) -> str:
    """Advise how to find a file or folder that is not there: by a name nearly like it, or by the
    folder's list."""
    with suppress(OSError):
        names = {other.stem: other.name for other in sorted(path.parent.iterdir())}
        if near := difflib.get_close_matches(path.stem, names, 1, 0.7):
            return f"did you mean {path.parent / names[near[0]]}?"
    return f"ls {path.parent}"
