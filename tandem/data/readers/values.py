"""What no row may hold, whatever its format: values that JSON or UTF-8 cannot write, and rows
without bounds.

Does not know files or what a row means.
"""

import math
from typing import Any

from tandem.data.readers.row_errors import RowError

# no chat is this long; a file without line ends would otherwise be read into memory whole
MAX_ROW_BYTES = 16 << 20
MAX_DEPTH = 100  # deeper rows cannot be written back as JSON everywhere


def refuse_bad_leaf(values: dict[str, Any]) -> None:
    """Raises RowError for the first value that cannot stay, with its path as the field."""
    found = _bad_leaf(values, 1)
    if found is not None:
        path, error = found
        error.field = path.lstrip(".")
        raise error


def _bad_leaf(value: Any, depth: int) -> tuple[str, RowError] | None:
    """The first leaf that JSON or UTF-8 has no way to write, as (path, mistake). json.loads lets
    all of them pass."""
    if isinstance(value, str):
        return _bad_text(value)
    if isinstance(value, float):
        return None if math.isfinite(value) else ("", RowError(str(value), "a finite number"))
    if isinstance(value, dict | list) and depth > MAX_DEPTH:
        return "", too_deep()
    if isinstance(value, dict):
        for name, child in value.items():
            if (bad := _bad_leaf(child, depth + 1)) is not None:
                return f".{name}{bad[0]}"[:80], bad[1]
            if not name.isascii() and not is_unicode(name):
                return "", _lone_surrogate()
    elif isinstance(value, list):
        for i, child in enumerate(value):
            if (bad := _bad_leaf(child, depth + 1)) is not None:
                return f"[{i}]{bad[0]}"[:80], bad[1]
    return None


def _bad_text(text: str) -> tuple[str, RowError] | None:
    if len(text) > MAX_ROW_BYTES:
        return "", RowError(
            f"text of more than {MAX_ROW_BYTES >> 20} MiB", "a shorter row", next="remove the row"
        )
    return None if text.isascii() or is_unicode(text) else ("", _lone_surrogate())


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lone_surrogate() -> RowError:
    return RowError("half of a surrogate pair (a \\ud800 to \\udfff escape alone)", "Unicode text")


def too_deep() -> RowError:
    return RowError(f"more than {MAX_DEPTH} levels of nesting", "a flatter row")
