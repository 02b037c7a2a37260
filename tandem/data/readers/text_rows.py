"""Rows of text files: JSONL and CSV, in UTF-8.

Yields every row with its place and continues after a bad one, as long as the format says where the
next row begins. Knows lines, JSON and commas. Does not know what a row means.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from tandem.data.readers.row_errors import (
    MAX_DEPTH,
    MAX_ROW_BYTES,
    RowError,
    is_unicode,
    refuse_bad_leaf,
    show,
    too_deep,
)
from tandem.runtime.errors import UserError

Values = dict[str, Any]
# (values, their JSON: empty if the file is not JSON), or why there are none
Payload = tuple[Values, str] | RowError

UTF8_MARK = b"\xef\xbb\xbf"  # the byte order mark that some editors write


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (number, bytes) of every line, without the byte order mark. An overlong line is
    truncated to MAX_ROW_BYTES + 1."""
    number = 0
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        rest = line
        while len(rest) > MAX_ROW_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(MAX_ROW_BYTES + 1)
        yield number, line.removeprefix(UTF8_MARK) if number == 1 else line


def _refuse_utf16(head: bytes, file: Path, key: str) -> None:
    """Raise UserError for UTF-16, which would give one mistake per line."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(
            f"{key} is not UTF-8",
            where=str(file),
            found="a UTF-16 byte order mark",
            expected="text in UTF-8",
            next=f"iconv -f UTF-16 -t UTF-8 {file} > {file.stem}-utf8{file.suffix}",
        )


def _overlong() -> RowError:
    return RowError(
        f"a line of more than {MAX_ROW_BYTES >> 20} MiB", "a shorter row", next="remove the row"
    )


# ---- JSONL


def jsonl_rows(file: Path, key: str) -> Iterator[tuple[str, Payload]]:
    """Yield (place, payload) for every line that is not blank."""
    with file.open("rb") as stream:
        head = stream.read(16)
        stream.seek(0)
        _refuse_utf16(head, file, key)
        if head.removeprefix(UTF8_MARK).lstrip().startswith(b"["):  # also one mistake per line
            raise UserError(
                f"{key} is not JSONL",
                where=f"{file}:1",
                found="a JSON array",
                expected="one JSON object a line",
                next=f"jq -c '.[]' {file} > {file.stem}-lines.jsonl",
            )
        for number, line in _lines(stream):
            if line := line.rstrip():
                try:
                    payload: Payload = _parse(line)
                except RowError as error:
                    payload = error
                yield f":{number}", payload


def _parse(line: bytes) -> tuple[Values, str]:
    if len(line) > MAX_ROW_BYTES:
        raise _overlong()
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise RowError(
            f"invalid UTF-8 at byte {error.start + 1} of the line", "UTF-8 text"
        ) from None
    try:
        values, suspect = _decode(text)
    except json.JSONDecodeError as error:
        near = show(text[max(0, error.pos - 12) : error.pos + 12])
        found = f"broken JSON at column {error.colno}, near {near}: {error.msg}"
        raise RowError(found, "one JSON object a line") from None
    except RecursionError:
        raise too_deep() from None
    # Python's limit on the digits of an int: all else that json.loads refuses
    except ValueError:
        raise RowError("a number of more than 4,300 digits", "a number, or text") from None
    if not isinstance(values, dict):
        raise RowError(show(values), "a JSON object, {...}")
    if suspect:
        refuse_bad_leaf(values)
    return values, text


class _NotFinite(Exception):
    """A number that is not finite, somewhere in a row."""


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _NotFinite
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise _NotFinite


def _once(pairs: list[tuple[str, Any]]) -> Values:
    """Build an object. Raises RowError for a key that comes twice: json.loads silently takes the
    last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(f"the key {show(twice)} twice in an object", "each key once")
    return values


_DECODE = json.JSONDecoder(object_pairs_hook=_once).decode
_DECODE_FINITE = json.JSONDecoder(
    object_pairs_hook=_once, parse_float=_finite, parse_constant=_refuse_constant
).decode


def _decode(text: str) -> tuple[Any, bool]:
    """Return (value, whether its leaves must be checked). Checking every leaf would take a third of
    the reading time, and each bad leaf leaves a trace in the row's text."""
    deep = text.count("[") + text.count("{") > MAX_DEPTH
    # in text decoded from UTF-8, surrogates are escapes
    halves = "\\ud" in text or "\\uD" in text
    try:
        return _DECODE_FINITE(text), deep or halves
    except _NotFinite:
        return _DECODE(text), True


# ---- CSV


def csv_rows(file: Path, key: str) -> Iterator[tuple[str, Payload]]:
    """Yield (place, payload) for every record below the header. All values are text, and an empty
    cell is null.

    Reading ends at a line that is too long and at a quote that never ends: the start of the next
    record is unknown.
    """
    csv.field_size_limit(MAX_ROW_BYTES)  # of the whole process: the module has no other setting
    with file.open("rb") as stream:
        _refuse_utf16(stream.read(2), file, key)
        stream.seek(0)
        reader = csv.reader(_texts(stream), strict=True)
        names: list[str] = []
        end = 0  # last line of the record before
        try:
            for cells in reader:
                start, end = end + 1, reader.line_num
                if cells and names:
                    yield f":{start}", _record(names, cells)
                elif cells:
                    names = _header(cells, f"{file}:{start}", key)
        except csv.Error as error:
            expected = 'cells between commas, a cell with commas, quotes or lines as "..."'
            yield f":{end + 1}", RowError(f"broken CSV: {error}", expected)
        except RowError as error:
            yield f":{reader.line_num + 1}", error


def _texts(stream: BinaryIO) -> Iterator[str]:
    for _, line in _lines(stream):
        if len(line) > MAX_ROW_BYTES:
            raise _overlong()
        yield line.decode(errors="surrogateescape")


def _header(names: list[str], where: str, key: str) -> list[str]:
    mistake = f"{key} has no usable CSV header"
    if len(names) == 1 and any(mark in names[0] for mark in ";\t"):
        raise UserError(
            mistake, where=where, found=show(names[0]), expected="names with commas between them"
        )
    if "" in names or len(set(names)) < len(names):
        raise UserError(
            mistake,
            where=where,
            found=", ".join(map(show, names[:12])),
            expected="a different name for every column",
        )
    if not all(map(is_unicode, names)):
        raise UserError(mistake, where=where, found="invalid UTF-8", expected="UTF-8 text")
    return names


def _record(names: list[str], cells: list[str]) -> Payload:
    if len(cells) != len(names):
        return RowError(f"{len(cells)} cells", f"{len(names)}, as in the header")
    for name, cell in zip(names, cells, strict=True):
        if not cell.isascii() and not is_unicode(cell):
            return RowError("invalid UTF-8", "UTF-8 text", field=name)
    return {name: cell or None for name, cell in zip(names, cells, strict=True)}, ""
