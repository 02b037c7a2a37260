"""Rows of a JSONL or Parquet file, and every mistake in them told with its place.

Reads a file row by row, hands each row to a `build` function, and collects what is wrong into one error. Knows
files and rows. Does not know what a message, a problem or a training chat is, nor any model or tokenizer.
"""

import difflib
import gc
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tandem.errors import UserError

T = TypeVar("T")

MAX_ROW_BYTES = 16 << 20  # no chat is this long; a file without line ends would otherwise be read into memory whole
MAX_DEPTH = 100  # deeper rows cannot be written back as JSON everywhere
MAX_MISTAKES = 10
UTF8_MARK = b"\xef\xbb\xbf"  # the byte order mark some editors write; in UTF-8 it says nothing

# Names that data sets use for our columns, likeliest first; only to suggest one in an error.
ALIASES = {
    "prompt": ("messages", "question", "problem", "instruction", "query", "input", "text"),
    "messages": ("conversations", "conversation", "chat", "chosen"),
    "response": ("completion", "answer", "output", "chosen", "target"),
    "answer": ("ground_truth", "solution", "target", "label", "final_answer", "expected"),
}


_DECODE_EXACTLY = json.JSONDecoder(parse_int=str, parse_float=str).decode


class RowError(Exception):
    """One mistake in one row; read_rows adds the file and the line."""

    def __init__(self, found: str, expected: str, *, field: str = "", next: str = ""):
        super().__init__(found)
        self.found, self.expected, self.field, self.next = found, expected, field, next


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row. Example: Row(number=1, values={"prompt": "1 + 1 =", "answer": 2}, line='{"prompt": ...}')"""

    number: int  # counts the rows of the file from 1; blank lines are no rows
    values: dict[str, Any]
    line: str  # the row's JSON; empty for Parquet


Payload = bytes | dict[str, Any] | RowError  # a line of JSON, the values of a Parquet row, or why there are none


def read_rows(path: str, build: Callable[[Row], T], *, key: str) -> list[T]:
    """Build something from every row of a .jsonl, .json (lines) or .parquet file.

    key is the config key that names the file. Raises UserError with up to MAX_MISTAKES different mistakes.
    """
    file = _existing(path, key)
    payloads = _parquet_rows(file, key) if file.suffix == ".parquet" else _lines(file, key)
    mistakes = _Mistakes(path, key)
    built = []
    try:
        with _no_garbage_collection():
            for number, (place, payload) in enumerate(payloads, start=1):
                try:
                    built.append(build(_parse(number, payload)))
                except RowError as error:
                    mistakes.add(place, error)
                    if mistakes.full:
                        break
    except OSError as error:
        raise UserError(f"{key} cannot be read", where=path, found=str(error), next=f"ls -l {path}") from None
    mistakes.raise_any()
    if not built:
        raise UserError(f"{key} has no rows", where=path, found="an empty file", expected="at least one row")
    return built


def _parse(number: int, payload: Payload) -> Row:
    match payload:
        case bytes():
            values, line = _parse_line(payload)
            row = Row(number=number, values=values, line=line)
        case dict():
            row = Row(number=number, values=payload, line="")
        case RowError():
            raise payload
    _refuse_bad_leaf(row.values)
    return row


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """The rows are all kept, so looking for garbage among them again and again is a third of the reading time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _existing(path: str, key: str) -> Path:
    file = Path(path)
    if not path or not file.exists():
        found = f"{path!r}, which does not exist" if path else "no path"
        advice = f"ls {file.parent}" if path else f"set {key}=FILE"
        raise UserError(f"{key} names no file", where=key, found=found, expected="a JSONL or Parquet file", next=advice)
    if not file.is_file():
        expected = "a JSONL or Parquet file"
        raise UserError(f"{key} is not a file", where=path, found="a directory or device", expected=expected)
    if file.suffix not in (".jsonl", ".json", ".parquet"):
        expected = ".jsonl, .json (one object a line) or .parquet"
        found, advice = f"suffix {file.suffix!r}", "convert the file, or rename it if only its name is wrong"
        raise UserError(f"{key} has an unknown format", where=path, found=found, expected=expected, next=advice)
    return file


# ---- JSONL


def _lines(file: Path, key: str) -> Iterator[tuple[str, Payload]]:
    """(place, bytes of the line) for every line that is not blank; an overlong line comes cut."""
    with file.open("rb") as stream:
        _refuse_other_files(stream.read(16), file, key)
        stream.seek(0)
        number = 0
        while line := stream.readline(MAX_ROW_BYTES + 1):
            number += 1
            rest = line
            while len(rest) > MAX_ROW_BYTES and not rest.endswith(b"\n"):
                rest = stream.readline(MAX_ROW_BYTES + 1)
            if number == 1:
                line = line.removeprefix(UTF8_MARK)
            if line := line.rstrip():
                yield f":{number}", line


def _refuse_other_files(head: bytes, file: Path, key: str) -> None:
    """Two files that would give one mistake a line: UTF-16, and one JSON array around all rows."""
    expected = "one JSON object a line, in UTF-8"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        advice = f"iconv -f UTF-16 -t UTF-8 {file} > {file.stem}-utf8.jsonl"
        found = "a UTF-16 byte order mark"
        raise UserError(f"{key} is not UTF-8", where=str(file), found=found, expected=expected, next=advice)
    if head.removeprefix(UTF8_MARK).lstrip().startswith(b"["):
        advice = f"jq -c '.[]' {file} > {file.stem}-lines.jsonl"
        raise UserError(f"{key} is not JSONL", where=f"{file}:1", found="a JSON array", expected=expected, next=advice)


def _parse_line(line: bytes) -> tuple[dict[str, Any], str]:
    if len(line) > MAX_ROW_BYTES:
        raise RowError(f"a line of more than {MAX_ROW_BYTES >> 20} MiB", "a shorter row", next="remove the row")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise RowError(f"invalid UTF-8 at byte {error.start + 1} of the line", "UTF-8 text") from None
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        near = show(text[max(0, error.pos - 12) : error.pos + 12])
        found = f"broken JSON at column {error.colno}, near {near}: {error.msg}"
        raise RowError(found, "one JSON object a line") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # Python's limit on the digits of an int, the only other thing json.loads refuses
        raise RowError("a number of more than 4,300 digits", "a number, or text") from None
    if not isinstance(values, dict):
        raise RowError(show(values), "a JSON object, {...}")
    return values, text


# ---- Parquet


def _parquet_rows(file: Path, key: str) -> Iterator[tuple[str, Payload]]:
    """(place, values) for every row; a row with invalid UTF-8 comes as its RowError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        # One thread: whoever starts the process counts its threads, and reading is not what takes the time.
        for batch in pq.ParquetFile(file).iter_batches(batch_size=1024, use_threads=False):
            for values in _batch_rows(batch):
                number += 1
                yield f":row {number}", values
    except (pa.ArrowException, OSError) as error:
        found = str(error).splitlines()[0]
        raise UserError(f"{key} cannot be read as Parquet", where=f"{file}, after row {number}", found=found) from None


def _batch_rows(batch: Any) -> Sequence[Payload]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    except UnicodeDecodeError:  # Arrow does not check strings; look for the rows one by one
        return [_row_or_error(batch.slice(i, 1)) for i in range(batch.num_rows)]


def _row_or_error(row: Any) -> dict[str, Any] | RowError:
    values = {}
    for name in row.schema.names:
        try:
            values[name] = row.column(name)[0].as_py()
        except UnicodeDecodeError as error:
            return RowError(f"invalid UTF-8 at byte {error.start + 1}", "UTF-8 text", field=name)
    return values


# ---- what no row may hold


def _refuse_bad_leaf(values: dict[str, Any]) -> None:
    found = _bad_leaf(values, 1)
    if found is not None:
        path, error = found
        error.field = path.lstrip(".")
        raise error


def _bad_leaf(value: Any, depth: int) -> tuple[str, RowError] | None:
    """The first leaf that JSON or UTF-8 has no way to write, as (path, mistake). json.loads lets all of them pass."""
    if isinstance(value, str):
        return None if value.isascii() or _is_unicode(value) else ("", _lone_surrogate())
    if isinstance(value, float):
        return None if math.isfinite(value) else ("", RowError(str(value), "a finite number, or null"))
    if isinstance(value, dict | list) and depth > MAX_DEPTH:
        return "", _too_deep()
    if isinstance(value, dict):
        for name, child in value.items():
            if (bad := _bad_leaf(child, depth + 1)) is not None:
                return f".{name}{bad[0]}"[:80], bad[1]
            if not name.isascii() and not _is_unicode(name):
                return "", _lone_surrogate()
    elif isinstance(value, list):
        for i, child in enumerate(value):
            if (bad := _bad_leaf(child, depth + 1)) is not None:
                return f"[{i}]{bad[0]}"[:80], bad[1]
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lone_surrogate() -> RowError:
    return RowError("half of a surrogate pair (a \\ud800 to \\udfff escape alone)", "Unicode text")


def _too_deep() -> RowError:
    return RowError(f"more than {MAX_DEPTH} levels of nesting", "a flatter row")


# ---- what build functions use


def column(row: Row, name: str, *, rename: str) -> Any:
    """row's value in a column that must be there. rename: what to do about a near name, with {} for it."""
    if name in row.values:
        return row.values[name]
    names = list(row.values)
    near = [n for n in ALIASES.get(name, ()) if n in row.values] or difflib.get_close_matches(name, names, 1, 0.6)
    found = "columns " + ", ".join(n[:40] for n in names[:8]) + (", ..." if len(names) > 8 else "")
    advice = rename.format(near[0]) if near else ""
    raise RowError(found if names else "an empty row", f"a column {name!r}", field=name, next=advice)


def exact_number(row: Row, *path: str) -> str:
    """The number at path as the file writes it: 0.10 stays 0.10, and no digit is lost to a double."""
    value = _DECODE_EXACTLY(row.line) if row.line else row.values
    for name in path:
        value = value[name]
    return str(value)


def show(value: Any) -> str:
    """A value for an error message: its JSON, or the kind and size of what is too long to print."""
    match value:
        case None | bool():
            return json.dumps(value)
        case str():
            return f'text "{value[:40]}..."' if len(value) > 40 else f'"{value}"'
        case list():
            return f"a list of {len(value)}"
        case dict():
            return f"an object with {', '.join(list(value)[:5]) or 'no keys'}"
        case _:
            return str(value)[:60]


# ---- the one error


class _Mistakes:
    """Mistakes by what they say, so that a column missing in 100,000 rows is one line."""

    def __init__(self, path: str, key: str):
        self.path, self.key = path, key
        self.places: dict[tuple[str, str, str], tuple[str, int]] = {}  # (field, found, expected) -> first place, rows
        self.next = ""

    @property
    def full(self) -> bool:
        return len(self.places) == MAX_MISTAKES

    def add(self, place: str, error: RowError) -> None:
        what = (error.field, error.found, error.expected)
        first, rows = self.places.get(what, (place, 0))
        self.places[what] = (first, rows + 1)
        self.next = self.next or error.next

    def raise_any(self) -> None:
        if not self.places:
            return
        rows = sum(count for _, count in self.places.values())
        what = f"{self.key} has {'a row' if rows == 1 else f'{rows:,} rows'} that cannot be used"
        if len(self.places) == 1:
            [((field, found, expected), (place, _))] = self.places.items()
            raise UserError(what, where=self._where(place, field, rows), found=found, expected=expected, next=self.next)
        what = f"{what} (reading stopped there)" if self.full else what
        lines = [
            f"  - {self._where(place, field, count)}: found {found}, expected {expected}"
            for (field, found, expected), (place, count) in self.places.items()
        ]
        raise UserError("\n".join([what, *lines]), next=self.next or "correct these rows")

    def _where(self, place: str, field: str, rows: int) -> str:
        more = f" (and {rows - 1:,} more)" if rows > 1 else ""
        return f"{self.path}{place}{', ' * bool(field)}{field}{more}"
