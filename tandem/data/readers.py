"""Rows of data: each row of a source built into something, with all mistakes in one error.

    problems.jsonl   chats.parquet   pairs.csv.gz   folder   folder#train   openai/gsm8k:main#train

A source is a file, a folder that Hugging Face's `datasets` wrote with save_to_disk, a data set of
the hub (needs the extra `datasets`), or benchmarks by name, suite:gsm8k (plugins/suites). Rows are
read one by one or in small batches. Does not know what a row means, nor what a message, a problem
or a training chat is.
"""

import difflib
import gc
import io
import json
import logging
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from tandem.registry import find
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
COMPRESSED = (".gz", ".zst")
TEXT = (".jsonl", ".json", ".csv", ".tsv")
SUFFIXES = (*(kind + end for kind in TEXT for end in ("", *COMPRESSED)), ".parquet")
SUITE = "suite:"  # begins the names of benchmarks
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
    mistakes: dict[tuple[str, str, str], list[str]] = {}  # field, found, expected -> places
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
                mistakes.setdefault((error.field, error.found, error.expected), []).append(place)
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
            f"{key} has no rows", where=source, expected="at least one row; a header alone is none"
        )
    return built


def _mistakes(
    source: str, key: str, mistakes: dict[tuple[str, str, str], list[str]], advice: str
) -> UserError:
    """Write the one error of (field, found, expected) -> places."""
    rows = sum(map(len, mistakes.values()))
    what = f"{key} has {'a row' if rows == 1 else f'{rows:,} rows'} that cannot be used"
    what += " (reading stopped there)" if len(mistakes) == MAX_MISTAKES else ""
    for (field, found, expected), places in mistakes.items():
        more = f" (and {len(places) - 1:,} more)" if len(places) > 1 else ""
        where = f"{source}{places[0]}{', ' * bool(field)}{field}{more}"
        if len(mistakes) == 1:
            return UserError(what, where=where, found=found, expected=expected, next=advice)
        what += f"\n  - {where}: found {found}, expected {expected}"
    return UserError(what, next=advice or "correct these rows")


def tell_repeats(contents: Iterable[Hashable], key: str) -> None:
    """Warn of the rows of a key whose content is that of an earlier row."""
    hashes = [hash(content) for content in contents]
    if repeated := len(hashes) - len(set(hashes)):
        logger.warning(
            "%d of %d rows of %s are duplicates; all are kept", repeated, len(hashes), key
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


def column(row: Row, needed: Mapping[str, str], *, otherwise: str = "", taken: str = "") -> Any:
    """Return the row's value in the first column that it needs. Raises RowError.

    needed: by column the advice if another has a similar name, with {} for that name; otherwise: if
    none has, or the column `taken`, which has another use.
    """
    name, names, advice = next(iter(needed)), list(row.values), list[str]()
    if name in names:
        return row.values[name]
    missing = [each for each in needed if each not in ["", *names]]
    for each in missing:
        near = [alias for alias in ALIASES.get(each, ()) if alias in names]
        near = near or difflib.get_close_matches(each, names, 1, 0.6)
        if near and near[0] != taken:
            advice.append(needed[each].format(taken := near[0]))
    found = "columns " + ", ".join(n[:40] for n in names[:8]) + (", ..." if len(names) > 8 else "")
    expected, cure = " and ".join(f"a column {n!r}" for n in missing), " and ".join(advice)
    raise RowError(found if names else "an empty row", expected, field=name, next=cure or otherwise)


def exact_number(row: Row, *path: str) -> str:
    """Return the number at path as the file writes it: 0.10 stays 0.10, and all digits are kept."""
    values = _DECODE_EXACTLY(row.line) if row.line else row.values
    return str(reduce(getitem, path, values))


# ---- the source, by what exists and by the suffix


class Source(NamedTuple):
    """A source's name, taken apart."""

    path: Path
    split: str
    on_hub: bool
    suffix: str  # of the file's format, and that of its compression, or SUITE; "" if it has none


def source_rows(name: str, key: str) -> Placed:
    """Yield (place, payload) for every row. key: the config key that names the source. Raises
    UserError."""
    source = _locate(name, key)
    if source.suffix == SUITE:
        kind = "suite"
    elif source.on_hub or source.path.is_dir():
        kind = "dataset"
    elif source.suffix.startswith(".json"):
        return _jsonl_rows(source.path, key)
    else:
        kind = "parquet" if source.suffix == ".parquet" else "csv"
    rows: Placed = find("tables", kind, key=key)(source, key)
    return rows


def source_files(name: str, key: str) -> list[Path]:
    """Return the files that the rows of a source are in. Raises UserError."""
    source = _locate(name, key)
    if not (source.suffix == SUITE or source.on_hub or source.path.is_dir()):
        return [source.path]
    kind = "suite_files" if source.suffix == SUITE else "dataset_files"
    files: list[Path] = find("tables", kind, key=key)(source, key)
    return files


def _locate(name: str, key: str) -> Source:
    source = _split(name)
    if source.suffix == SUITE:
        return source
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
    if name.startswith(SUITE):
        return Source(Path(name), "", False, SUITE)
    base, mark, split = name.rpartition("#")
    if Path(name).exists() or not mark:
        base, split = name, ""
    suffix = next(filter(base.endswith, SUFFIXES), "")
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

    sources, prefixes = [_split(name) for name in names], []
    longest = max(len(source.path.parts) for source in sources)
    for source, name in zip(sources, names, strict=True):
        for parts in range(longest + 1):
            if [end(other, parts) for other in sources].count(end(source, parts)) == 1:
                prefixes.append(end(source, parts))
                break
        else:
            raise UserError(
                f"{key} names a source twice", where=key, found=name, expected="each source once"
            )
    return prefixes


# ---- JSONL, in UTF-8


def open_text(file: Path) -> io.TextIOWrapper:
    """Open a text file, also a compressed one; bytes that are not UTF-8 become surrogates."""
    if file.suffix in COMPRESSED:
        import pyarrow as pa

        stream = io.BufferedReader(pa.input_stream(str(file), compression="detect"))
    else:
        stream = file.open("rb")
    return io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="\n")


def _jsonl_rows(file: Path, key: str) -> Placed:
    with open_text(file) as lines:
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
