"""Rows of data: each row of a source built into something, with all mistakes in one error.

    problems.jsonl   chats.parquet   pairs.csv.gz   folder   folder#train   openai/gsm8k:main#train

A source is a file, a folder that Hugging Face's `datasets` wrote with save_to_disk, or a data set
of the hub (needs the extra `datasets`). Rows are read one by one or in small batches. Does not know
what a row means, nor what a message, a problem or a training chat is.
"""

import base64
import csv
import difflib
import gc
import io
import json
import logging
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from tandem.runtime.errors import UserError
from tandem.runtime.wording import look_for

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Names that data sets use for our columns, likeliest first; only suggested in errors.
ALIASES = {
    "prompt": ("messages", "question", "problem", "instruction", "query", "input", "text"),
    "messages": ("conversations", "conversation", "chat", "chosen"),
    "response": ("completion", "answer", "output", "chosen", "target"),
    "answer": ("ground_truth", "solution", "target", "label", "final_answer", "expected"),
}

MANY = 100_000  # rows; of fewer a search for garbage takes milliseconds
MAX_MISTAKES = 10
BATCH = 1024  # rows of a table
LONGEST_CELL = 16 << 20  # characters; a quote that never ends would take the rest of a file
COMPRESSED = (".gz", ".zst")
# in the folder of one split, and of several
STATE, SPLITS = "state.json", "dataset_dict.json"
# OWNER/NAME or OWNER/NAME:CONFIGURATION, without the split
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")

_DECODE_EXACTLY = json.JSONDecoder(parse_int=str, parse_float=str).decode


class RowError(Exception):
    """One mistake in one row. read_rows adds the file and the line."""

    def __init__(self, found: str, expected: str, *, field: str = "", next: str = ""):
        super().__init__(found)
        self.found, self.expected, self.field, self.next = found, expected, field, next


# (values, their JSON: empty if the file is not JSON), or why there are none
Payload = tuple[dict[str, Any], str] | RowError
Placed = Iterator[tuple[str, Payload]]  # with the place in the source, ":3" or ":row 3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row. Example: Row(number=1, values={"prompt": "1 + 1 =", "answer": 2}, line='{"prompt":
    ...}')"""

    number: int  # counts the rows of the source from 1; blank lines are no rows
    values: dict[str, Any]
    line: str  # the row's JSON; empty if the source is not JSONL
    folder: Path = Path()  # that relative paths in the row begin in


def read_rows(source: str, build: Callable[[Row], T], *, key: str) -> list[T]:
    """Call `build` with every row of a source and return the results in order.

    key: the config key that names the source. Raises UserError with up to MAX_MISTAKES different
    mistakes; a mistake of many rows stands there once.
    """
    path = Path(source if Path(source).exists() else source.rpartition("#")[0])
    folder = path if path.is_dir() else path.parent if path.is_file() else Path()
    built: list[T] = []
    mistakes: dict[tuple[str, str, str], tuple[str, int]] = {}  # -> first place, rows
    advice = ""
    was_enabled = gc.isenabled()
    gc.disable()  # all rows are kept, and searching them for garbage takes a third of the time
    try:
        for number, (place, payload) in enumerate(source_rows(source, key), start=1):
            try:
                if isinstance(payload, RowError):
                    raise payload
                values, line = payload
                built.append(build(Row(number=number, values=values, line=line, folder=folder)))
            except RowError as error:
                mistake = (error.field, error.found, error.expected)
                first, count = mistakes.get(mistake, (place, 0))
                mistakes[mistake] = (first, count + 1)
                advice = advice or error.next
                if len(mistakes) == MAX_MISTAKES:
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
    if mistakes:
        raise _mistakes(source, key, mistakes, advice)
    if not built:
        raise UserError(
            f"{key} has no rows",
            where=source,
            found="no rows (a header alone is none)",
            expected="at least one row",
        )
    return built


def _mistakes(
    source: str, key: str, mistakes: dict[tuple[str, str, str], tuple[str, int]], advice: str
) -> UserError:
    """Write the one error of (field, found, expected) -> (first place, number of rows)."""
    rows = sum(count for _, count in mistakes.values())
    what = f"{key} has {'a row' if rows == 1 else f'{rows:,} rows'} that cannot be used"
    places = []
    for (field, found, expected), (place, count) in mistakes.items():
        more = f" (and {count - 1:,} more)" if count > 1 else ""
        places.append((f"{source}{place}{', ' * bool(field)}{field}{more}", found, expected))
    if len(places) == 1:
        [(where, found, expected)] = places
        return UserError(what, where=where, found=found, expected=expected, next=advice)
    what += " (reading stopped there)" if len(places) == MAX_MISTAKES else ""
    lines = [
        f"  - {where}: found {found}, expected {expected}" for where, found, expected in places
    ]
    return UserError("\n".join([what, *lines]), next=advice or "correct these rows")


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


def show(value: Any) -> str:
    """Write a value for an error message: its JSON, or the kind and size of one that is too long to
    print."""
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


# ---- the source, by what exists and by the suffix


class Source(NamedTuple):
    """A source's name, taken apart."""

    path: Path
    split: str
    on_hub: bool
    suffix: str  # of the file's format, and that of its compression; "" if it has no such


def source_rows(name: str, key: str) -> Placed:
    """Yield (place, payload) for every row. key: the config key that names the source. Raises
    UserError."""
    source = _locate(name, key)
    if not (source.on_hub or source.path.is_dir()):
        return READERS[source.suffix](source.path, key)
    batches: Iterator[Any]
    if source.on_hub:
        tables = _hub_dataset(source, key).with_format("arrow").iter(batch_size=BATCH)
        batches = (batch for table in tables for batch in table.to_batches())
    else:
        batches = _arrow_batches(_folder_files(source, key))
    what = "from the hub" if source.on_hub else "as a Hugging Face dataset"
    return _table_rows(batches, f"{key} cannot be read {what}", str(source.path))


def source_files(name: str, key: str) -> list[Path]:
    """Return the files that the rows of a source are in. Raises UserError."""
    source = _locate(name, key)
    if source.on_hub:
        return [Path(file["filename"]) for file in _hub_dataset(source, key).cache_files]
    return _folder_files(source, key) if source.path.is_dir() else [source.path]


def _locate(name: str, key: str) -> Source:
    source = _split(name)
    if not name or not (source.on_hub or source.path.exists()):
        raise UserError(
            f"{key} names no file",
            where=key,
            found=f"{name!r}, which does not exist" if name else "no path",
            expected="a JSONL, Parquet or CSV file, a Hugging Face dataset folder, or OWNER/NAME "
            "of one on the hub",
            next=look_for(source.path) if name else f"set {key}=FILE",
        )
    if source.on_hub or source.path.is_dir() or (source.suffix and source.path.is_file()):
        return source
    suffix = f"suffix {''.join(source.path.suffixes[-2:])!r}"
    raise UserError(
        f"{key} has an unknown format",
        where=name,
        found=suffix if source.path.is_file() else "a device, or a pipe",
        expected=".jsonl, .json (one object a line), .csv or .tsv, also with .gz or .zst; "
        "or .parquet",
        next="convert the file, or rename it if only its name is wrong",
    )


def _split(name: str) -> Source:
    """Take a name apart: unless the whole name exists, the text behind the last # is the split."""
    base, mark, split = name.rpartition("#")
    if Path(name).exists() or not mark:
        base, split = name, ""
    suffix = next(filter(base.endswith, READERS), "")
    on_hub = not Path(base).exists() and HUB_NAME.fullmatch(base) and not suffix
    return Source(Path(base), split, bool(on_hub), suffix)


def uid_prefixes(names: Sequence[str], key: str) -> list[str]:
    """Return the uid prefixes of rows without a uid: the file's name without suffix, or as much
    more of the path as tells two sources apart. Raises UserError for a source that comes twice.

    Example: ["a/train.jsonl", "b/train.jsonl", "c.csv"] gives ["a/train.jsonl", "b/train.jsonl",
    "c"]
    """

    def end(source: Source, parts: int) -> str:
        path = source.path
        end = "/".join(path.parts[-parts:]) if parts else path.name.removesuffix(source.suffix)
        return f"{end}#{source.split}" if source.split else end

    sources = [_split(name) for name in names]
    longest = max(len(source.path.parts) for source in sources)
    ends = [[end(source, parts) for parts in range(longest + 1)] for source in sources]
    for number, name in enumerate(names):
        if ends[number][-1] in [other[-1] for other in ends[:number]]:
            raise UserError(
                f"{key} names a source twice", where=key, found=name, expected="each source once"
            )
    columns = list(zip(*ends, strict=True))
    return [
        next(column[number] for column in columns if column.count(column[number]) == 1)
        for number in range(len(names))
    ]


# ---- JSONL and CSV, in UTF-8


def _open(file: Path, key: str) -> io.TextIOWrapper:
    """Open a text file, also a compressed one; bytes that are not UTF-8 become surrogates. Raises
    UserError for UTF-16 and for a JSON array, which would give one mistake per line."""
    if file.suffix in COMPRESSED:
        import pyarrow as pa

        stream = io.BufferedReader(pa.input_stream(str(file), compression="detect"))
    else:
        stream = file.open("rb")
    start = stream.peek(16)
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(
            f"{key} is not UTF-8",
            where=str(file),
            found="a UTF-16 byte order mark",
            expected="text in UTF-8",
            next=f"iconv -f UTF-16 -t UTF-8 {file} > {file.stem}-utf8{file.suffix}",
        )
    return io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="\n")


def _jsonl_rows(file: Path, key: str) -> Placed:
    with _open(file, key) as lines:
        for number, line in enumerate(lines, start=1):
            if not (line := line.rstrip()):
                continue
            if number == 1 and line.lstrip().startswith("["):
                raise UserError(
                    f"{key} is not JSONL",
                    where=f"{file}:1",
                    found="a JSON array",
                    expected="one JSON object a line",
                    next=f"jq -c '.[]' {file} > {file.stem}-lines.jsonl",
                )
            try:
                yield f":{number}", (_parse(line), line)
            except RowError as error:
                yield f":{number}", error


def _parse(line: str) -> dict[str, Any]:
    try:
        values = _DECODE(line)
        # JSON lets half of a surrogate pair pass, which no tokenizer takes
        (json.dumps(values, ensure_ascii=False) if "\\u" in line else line).encode()
    except UnicodeEncodeError:
        raise RowError("invalid UTF-8, or half of a surrogate pair", "UTF-8 text") from None
    except json.JSONDecodeError as error:
        near = show(line[max(0, error.pos - 12) : error.pos + 12])
        found = f"broken JSON at column {error.colno}, near {near}: {error.msg}"
        raise RowError(found, "one JSON object a line") from None
    except (ValueError, RecursionError) as error:  # Python's limits: digits of an int, nesting
        raise RowError(str(error), "a flatter row, and shorter numbers") from None
    if not isinstance(values, dict):
        raise RowError(show(values), "a JSON object, {...}")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise RowError(name, "a finite number")


_DECODE = json.JSONDecoder(parse_constant=_refuse_constant).decode


def _csv_rows(file: Path, key: str) -> Placed:
    """Yield the records below the header. All values are text, and an empty cell is null. The mark
    between cells is the one that gives the header most names.

    Reading ends at a cell that is too long and at a quote that never ends: the start of the next
    record is unknown.
    """
    csv.field_size_limit(LONGEST_CELL)  # of the whole process: the module has no other setting
    marks = "\t" if ".tsv" in file.suffixes[-2:] and file.suffix != ".csv" else ",;\t"
    with _open(file, key) as lines:
        head: list[str] = []
        names: list[str] = []
        while not "".join(head).strip() and (line := next(lines, "")):
            head.append(line)
        mark, end = marks[0], 0  # end: the last line of the record before
        try:
            mark = max(marks, key=lambda mark: len(next(csv.reader(head[-1:], delimiter=mark), ())))
            reader = csv.reader(chain(head, lines), delimiter=mark, strict=True)
            for cells in reader:
                start, end = end + 1, reader.line_num
                if cells and names:
                    yield f":{start}", _record(names, cells)
                elif cells and ("" in cells or len(set(cells)) < len(cells)):
                    raise UserError(
                        f"{key} has no usable CSV header",
                        where=f"{file}:{start}",
                        found=", ".join(map(show, cells[:12])),
                        expected="a different name for every column",
                    )
                names = names or cells
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


# ---- Parquet, folders of `datasets`, the hub


def _parquet_rows(file: Path, key: str) -> Placed:
    def batches() -> Iterator[Any]:
        import pyarrow.parquet as pq

        # One thread, because the thread count of the process is fixed; it is fast enough.
        yield from pq.ParquetFile(file).iter_batches(batch_size=BATCH, use_threads=False)

    return _table_rows(batches(), f"{key} cannot be read as Parquet", str(file))


_TEXT = {".jsonl": _jsonl_rows, ".json": _jsonl_rows, ".csv": _csv_rows, ".tsv": _csv_rows}
READERS = {suffix + end: rows for suffix, rows in _TEXT.items() for end in ("", *COMPRESSED)}
READERS[".parquet"] = _parquet_rows


def _arrow_batches(files: list[Path]) -> Iterator[Any]:
    import pyarrow as pa

    for file in files:
        with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
            for batch in stream:
                yield from (batch.slice(start, BATCH) for start in range(0, batch.num_rows, BATCH))


def _folder_files(source: Source, key: str) -> list[Path]:
    """Return the Arrow files of a save_to_disk folder. Raises UserError if it is another folder, or
    the split is not clear."""
    folder = source.path
    if source.split or (folder / SPLITS).is_file():
        folder /= _choose_split(_read_json(folder / SPLITS, "splits", key), source, key)
    return [
        folder / str(file["filename"]) for file in _read_json(folder / STATE, "_data_files", key)
    ]


def _choose_split(names: list[str], source: Source, key: str) -> str:
    """Return the split asked for, or the only one. Raises UserError that lists the splits."""
    if source.split in names:
        return source.split
    if not source.split and len(names) == 1:
        return names[0]
    raise UserError(
        f"{key} names no split of its dataset",
        where=str(source.path),
        found=f"no split {source.split!r}"
        if source.split
        else f"{len(names)} splits and none chosen",
        expected=f"one of {', '.join(names[:12])}",
        next=f"{key}='{source.path}#{names[0]}'" if names else "",
    )


def _read_json(file: Path, field: str, key: str) -> list[Any]:
    try:
        return list(json.loads(file.read_bytes())[field])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{key} is not a file, and cannot be read as a Hugging Face dataset",
            where=str(file.parent),
            found=f"{file.name}: {error.strerror if isinstance(error, OSError) else repr(error)}",
            expected=f"a folder written by datasets' save_to_disk, with {field} in {file.name}",
            next=f"name a JSONL, Parquet or CSV file; ls {file.parent}",
        ) from None


def _hub_dataset(source: Source, key: str) -> Any:
    """Load a data set of the hub, downloaded once and mapped from the cache."""
    name = str(source.path)
    try:
        import datasets
    except ModuleNotFoundError:
        raise UserError(
            f"{key} names no file, and a hub name needs the package datasets",
            where=key,
            found=repr(name),
            expected="a file, or the extra",
            next="pip install 'tandem-rl[datasets]'",
        ) from None
    path, _, configuration = name.partition(":")
    datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(path, configuration or None)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{key} names no file, and no dataset of the hub that can be had",
            where=f"{key}, {name!r}",
            found=(str(error).splitlines() or [type(error).__name__])[0],
            expected="a file, or a dataset that is on the hub or in its cache (HF_HUB_OFFLINE=1)",
            next=f"ls {Path(name).parent}",
        ) from None
    return splits[_choose_split([str(each) for each in splits], source, key)]


def _table_rows(batches: Iterable[Any], mistake: str, where: str) -> Placed:
    """Yield the rows of record batches. mistake: the message for a damaged file."""
    import pyarrow as pa

    number = 0
    try:
        for batch in batches:
            names = batch.schema.names
            if len(set(names)) < len(names):  # a row would hold either
                twice = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"two columns {twice!r}")
            for payload in _batch_rows(batch):
                number += 1
                yield f":row {number}", payload
    except (pa.ArrowException, OSError, ValueError) as error:
        found = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(mistake, where=f"{where}, after row {number}", found=found) from None


def _batch_rows(batch: Any) -> Iterator[Payload]:
    from pyarrow import types

    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            yield RowError("invalid UTF-8", "UTF-8 text")
        else:
            for i in range(batch.num_rows):
                yield from _batch_rows(batch.slice(i, 1))
        return
    plain = types.is_string, types.is_large_string, types.is_integer, types.is_boolean
    odd = [f for f in batch.schema if not any(is_plain(f.type) for is_plain in plain)]
    for row in rows:
        try:
            for field in odd:
                row[field.name] = _json_value(row[field.name], str(field.type))
            yield row, ""
        except RowError as error:
            error.field = field.name
            yield error


def _json_value(value: Any, kind: str) -> Any:
    """Convert a value of a column of this Arrow type to one that JSON can write, without null keys:
    Arrow gives all objects of a column the same keys. Decimals and times become their text, which
    keeps all digits of a decimal; a float32 becomes the number with the same shortest text, 0.1 and
    not 0.10000000149011612."""
    match value:
        case None | str() | int():
            return value
        case float():
            if not math.isfinite(value):
                raise RowError(str(value), "a finite number")
            if "float" not in kind:
                return value
            short = np.float16 if "halffloat" in kind else np.float32
            with np.errstate(over="ignore"):  # of a double beside it
                return float(str(short(value))) if short(value) == value else value
        case {"bytes": bytes() as data}:  # an image of datasets
            return f"data:;base64,{base64.b64encode(data).decode()}"
        case dict():
            return {k: _json_value(v, kind) for k, v in value.items() if v is not None}
        case list() | tuple():  # Arrow's maps are lists of pairs
            return [_json_value(child, kind) for child in value]
        case bytes():
            raise RowError(
                f"{len(value)} bytes that are no text",
                "text, numbers, lists or objects",
                next="leave the column out of the data",
            )
        case _:
            return str(value)
