"""Advice in the errors of a run folder, in the same words everywhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.runtime.errors import UserError
from tandem.runtime.wording import look_for

OTHER_FOLDER = "choose another with run.folder=PATH"
KEPT = "(the old run is kept beside it)"
FRESH = f"start over with --fresh {KEPT}"
RESTORE = "restore it from a copy"
RESTORE_OR_FRESH = f"{RESTORE}, or {FRESH}"


def unreadable_file(path: Path, found: Exception | str, next: str = RESTORE) -> UserError:
    """Make the error for a file that is absent, damaged or of another shape."""
    return UserError(
        "a file of the run folder cannot be read",
        where=str(path),
        found=f"{type(found).__name__}: {found}" if isinstance(found, Exception) else found,
        expected="the file as Tandem wrote it",
        next=next,
    )


def require_run(folder: Path) -> None:
    """Raise UserError for what is no run folder."""
    if not (folder / "config.toml").is_file():
        found = "a file" if folder.is_file() else "no such folder"
        found = "no config.toml in it" if folder.is_dir() else found
        inside = min(folder.glob("*/config.toml"), default=None)
        look = f"ls {folder.parent}" if folder.exists() else look_for(folder)
        raise UserError(
            "this is not a run folder",
            where=str(folder),
            found=found,
            expected="a folder made by a command that trains",
            next=f"did you mean {inside.parent}?" if inside else look,
        )


def not_written(rank: int, error: Mapping[str, Any]) -> UserError:
    """Return rank 0's error for what another rank could not write; error: the fields of its
    UserError."""
    fields = {name: error.get(name, "") for name in ("where", "found", "expected", "next")}
    return UserError(f"rank {rank} could not write its part: {error['what']}", **fields)
