"""Rows of text files: JSONL and CSV, in UTF-8, also compressed.

Yields every row with its place and continues after a bad one, as long as the format says where the
next row begins. Knows lines, JSON and the marks between cells. Does not know what a row means.
"""

import csv
import io
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from tandem.data.readers.row_errors import RowError, show
from tandem.runtime.errors import UserError

Values = dict[str, Any]
# (values, their JSON: empty if the file is not JSON), or why there are none
Payload = tuple[Values, str] | RowError

COMPRESSED = (".gz", ".zst")
UTF8_MARK = b"\xef\xbb\xbf"  # the byte order mark that some editors write
LONGEST_CELL = 16 << 20  # characters; a quote that never ends would take the rest of a file


def _open(file: Path, key: str) -> io.BufferedReader:
    """Open a file for its bytes without compression. Raises UserError for UTF-16, which would give
    one mistake per line."""
    if file.suffix in COMPRESSED:
        import pyarrow as pa

        stream = io.BufferedReader(pa.input_stream(str(file), compression="detect"))
    else:
        stream = file.open("rb")
    if stream.peek(2).startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(
            f"{key} is not UTF-8",
            where=str(file),
            found="a UTF-16 byte order mark",
            expected="text in UTF-8",
            next=f"iconv -f UTF-16 -t UTF-8 {file} > {file.stem}-utf8{file.suffix}",
        )
    return stream


def _lines(stream: io.BufferedReader) -> Iterator[bytes]:
    """Yield every line, without the byte order mark."""
    yield stream.readline().removeprefix(UTF8_MARK)
    yield from stream


# ---- JSONL


def jsonl_rows(file: Path, key: str) -> Iterator[tuple[str, Payload]]:
    """Yield (place, payload) for every line that is not blank."""
    with _open(file, key) as stream:
        # also one mistake per line
        if stream.peek(16).removeprefix(UTF8_MARK).lstrip().startswith(b"["):
            raise UserError(
                f"{key} is not JSONL",
                where=f"{file}:1",
                found="a JSON array",
                expected="one JSON object a line",
                next=f"jq -c '.[]' {file} > {file.stem}-lines.jsonl",
            )
        for number, line in enumerate(_lines(stream), start=1):
            if line := line.rstrip():
                try:
                    payload: Payload = _parse(line)
                except RowError as error:
                    payload = error
                yield f":{number}", payload


def _parse(line: bytes) -> tuple[Values, str]:
    try:
        text = line.decode()
        values = _DECODE(text)
        if "\\ud" in text or "\\uD" in text:  # JSON lets half of a pair pass
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        found = f"invalid UTF-8 at byte {error.start + 1} of the line"
        raise RowError(found, "UTF-8 text") from None
    except UnicodeEncodeError:
        found = "half of a surrogate pair (a \\ud800 to \\udfff escape alone)"
        raise RowError(found, "Unicode text") from None
    except json.JSONDecodeError as error:
        near = show(text[max(0, error.pos - 12) : error.pos + 12])
        found = f"broken JSON at column {error.colno}, near {near}: {error.msg}"
        raise RowError(found, "one JSON object a line") from None
    except RecursionError:
        raise RowError("too many levels of nesting", "a flatter row") from None
    # Python's limit on the digits of an int: all else that json.loads refuses
    except ValueError:
        raise RowError("a number of more than 4,300 digits", "a number, or text") from None
    if not isinstance(values, dict):
        raise RowError(show(values), "a JSON object, {...}")
    return values, text


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        _refuse_constant(text)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise RowError(name[:40], "a finite number")


def _once(pairs: list[tuple[str, Any]]) -> Values:
    """Build an object. Raises RowError for a key that comes twice: json.loads silently takes the
    last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(f"the key {show(twice)} twice in an object", "each key once")
    return values


_DECODE = json.JSONDecoder(
    object_pairs_hook=_once, parse_float=_finite, parse_constant=_refuse_constant
).decode


# ---- CSV


def csv_rows(file: Path, key: str) -> Iterator[tuple[str, Payload]]:
    """Yield (place, payload) for every record below the header. All values are text, and an empty
    cell is null. The mark between cells is the one that gives the header most names.

    Reading ends at a cell that is too long and at a quote that never ends: the start of the next
    record is unknown.
    """
    csv.field_size_limit(LONGEST_CELL)  # of the whole process: the module has no other setting
    with _open(file, key) as stream:
        texts = (line.decode(errors="surrogateescape") for line in _lines(stream))
        marks = "\t" if ".tsv" in file.suffixes[-2:] and file.suffix != ".csv" else ",;\t"
        names: list[str] = []
        head: list[str] = []
        mark, end = marks[0], 0  # the last line of the record before
        try:
            while not "".join(head).strip() and (text := next(texts, "")):
                head.append(text)
            mark = max(marks, key=lambda mark: len(next(csv.reader(head[-1:], delimiter=mark), ())))
            reader = csv.reader(chain(head, texts), delimiter=mark, strict=True)
            for cells in reader:
                start, end = end + 1, reader.line_num
                if cells and names:
                    yield f":{start}", _record(names, cells)
                elif cells and not ("" in cells or len(set(cells)) < len(cells)):
                    names = cells
                elif cells:
                    raise UserError(
                        f"{key} has no usable CSV header",
                        where=f"{file}:{start}",
                        found=", ".join(map(show, cells[:12])),
                        expected="a different name for every column",
                    )
        except csv.Error as error:
            expected = f'cells with {mark!r} between them, one with that, quotes or lines as "..."'
            yield f":{end + 1}", RowError(f"broken CSV: {error}", expected)


def _record(names: list[str], cells: list[str]) -> Payload:
    if len(cells) != len(names):
        return RowError(f"{len(cells)} cells", f"{len(names)}, as in the header")
    try:
        "".join((*names, *cells)).encode()
    except UnicodeEncodeError:
        return RowError("invalid UTF-8", "UTF-8 text")
    return {name: cell or None for name, cell in zip(names, cells, strict=True)}, ""
