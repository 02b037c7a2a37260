"""Names in a run folder, its small files, read with one error, and the advice of errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tandem.runtime.errors import UserError
from tandem.runtime.wording import look_for

OTHER_FOLDER = "choose another with run.folder=PATH"
KEPT = "(the old run is kept beside it)"
FRESH = f"start over with --fresh {KEPT}"
RESTORE = "restore it from a copy"
RESTORE_OR_FRESH = f"{RESTORE}, or {FRESH}"

LEDGER = "ledger.jsonl"
KEPT_MODEL = "model"  # in a run folder: config and tokenizer of its model
FAILED = "failed: "  # a line of log.txt

T = TypeVar("T")


def read_file(path: Path, parse: Callable[[str], T], next: str = RESTORE) -> T:
    """Read a file and parse its text. Raises UserError if it is absent, damaged or of another
    shape."""
    try:
        return parse(path.read_bytes().decode())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            "a file of the run folder cannot be read",
            where=str(path),
            found=f"{type(error).__name__}: {error}",
            expected="the file as Tandem wrote it",
            next=next,
        ) from error


def read_about(folder: Path, next: str = RESTORE) -> dict[str, str]:
    """Read command, time and working directory of a run from its run.json. Raises UserError."""
    path, names = folder / "run.json", ("command", "created", "directory")
    return read_file(path, lambda text: {n: str(json.loads(text)[n]) for n in names}, next)


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
