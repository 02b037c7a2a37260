"""Rows of a source, each built into something, with all mistakes in one error.

Knows rows. Does not know formats, nor what a message, a problem or a training chat is.
"""

import difflib
import gc
import json
import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tandem.data.readers.row_errors import Mistakes, RowError
from tandem.data.readers.sources import source_rows
from tandem.runtime.errors import UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Names that data sets use for our columns, likeliest first; only suggested in errors.
ALIASES = {
    "prompt": ("messages", "question", "problem", "instruction", "query", "input", "text"),
    "messages": ("conversations", "conversation", "chat", "chosen"),
    "response": ("completion", "answer", "output", "chosen", "target"),
    "answer": ("ground_truth", "solution", "target", "label", "final_answer", "expected"),
}

MANY = 100_000  # rows; of fewer a search takes milliseconds

_DECODE_EXACTLY = json.JSONDecoder(parse_int=str, parse_float=str).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row. Example: Row(number=1, values={"prompt": "1 + 1 =", "answer": 2}, line='{"prompt":
    ...}')"""

    number: int  # counts the rows of the source from 1; blank lines are no rows
    values: dict[str, Any]
    line: str  # the row's JSON; empty if the source is not JSONL
    folder: Path = Path()  # that relative paths in the row begin in


def read_rows(source: str, build: Callable[[Row], T], *, key: str) -> list[T]:
    """Call `build` with every row of a source (sources.py) and return the results in order.

    key: the config key that names the source. Raises UserError with up to MAX_MISTAKES different
    mistakes.
    """
    path = Path(source if Path(source).exists() else source.rpartition("#")[0])
    folder = path if path.is_dir() else path.parent if path.is_file() else Path()
    mistakes, built = Mistakes(source, key), []
    was_enabled = gc.isenabled()
    gc.disable()  # all rows are kept, and searching them for garbage takes a third of the time
    try:
        for number, (place, payload) in enumerate(source_rows(source, key), start=1):
            try:
                if isinstance(payload, RowError):
                    raise payload
                values, line = payload
                row = Row(number=number, values=values, line=line, folder=folder)
                built.append(build(row))
            except RowError as error:
                if not mistakes.add(place, error):
                    break
        if len(built) >= MANY:
            gc.freeze()  # they stay, and each search for garbage would walk through them
    except OSError as error:
        raise UserError(
            f"{key} cannot be read", where=source, found=str(error), next=f"ls -l {source}"
        ) from None
    finally:
        if was_enabled:
            gc.enable()
    mistakes.raise_any()
    if not built:
        raise UserError(
            f"{key} has no rows",
            where=source,
            found="no rows (a header alone is none)",
            expected="at least one row",
        )
    return built


def tell_repeats(contents: Iterable[Hashable], key: str) -> None:
    """Warn of the rows of a key whose content is that of an earlier row."""
    hashes = [hash(content) for content in contents]
    if repeated := len(hashes) - len(set(hashes)):
        logger.warning(
            "%s of the %s rows of %s repeat an earlier row, and each counts as one more",
            f"{repeated:,}",
            f"{len(hashes):,}",
            key,
        )


# ---- for build functions


def column(row: Row, name: str, *, rename: str, otherwise: str = "") -> Any:
    """Return the row's value in a required column.

    rename: advice if a column has a similar name, with {} for that name; otherwise: if none has.
    Raises RowError.
    """
    if name in row.values:
        return row.values[name]
    names = list(row.values)
    near = [n for n in ALIASES.get(name, ()) if n in row.values] or difflib.get_close_matches(
        name, names, 1, 0.6
    )
    found = "columns " + ", ".join(n[:40] for n in names[:8]) + (", ..." if len(names) > 8 else "")
    advice = rename.format(near[0]) if near else otherwise
    raise RowError(
        found if names else "an empty row", f"a column {name!r}", field=name, next=advice
    )


def exact_number(row: Row, *path: str) -> str:
    """Return the number at path as the file writes it: 0.10 stays 0.10, and all digits are kept."""
    value = _DECODE_EXACTLY(row.line) if row.line else row.values
    for name in path:
        value = value[name]
    return str(value)
