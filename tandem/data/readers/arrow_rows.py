"""Rows of Arrow tables: Parquet files, and folders that Hugging Face's `datasets` wrote with
save_to_disk.

Tables are mapped or read batch by batch, so that besides what is built from the rows only a batch
is in memory. Knows Arrow and the folder's layout. Does not need `datasets`, and does not know what
a row means.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tandem.data.readers.row_errors import RowError
from tandem.data.readers.text_rows import Payload
from tandem.data.readers.values import MAX_ROW_BYTES, refuse_bad_leaf
from tandem.runtime.errors import UserError

BATCH = 1024  # rows
# a data set's folder holds the first, a folder of several the second
STATE, SPLITS = "state.json", "dataset_dict.json"


def parquet_rows(file: Path, key: str) -> Iterator[tuple[str, Payload]]:
    """(place, payload) for every row."""
    import pyarrow.parquet as pq

    from tandem.data.readers.parquet_size import check_size

    def batches() -> Iterator[Any]:
        _refuse_twice(pq.read_schema(file).names)
        check_size(file)
        # One thread: whoever starts the process counts its threads, and reading is not what takes
        # the time.
        yield from pq.ParquetFile(file).iter_batches(batch_size=BATCH, use_threads=False)

    return table_rows(batches(), f"{key} cannot be read as Parquet", str(file))


def folder_rows(folder: Path, split: str, key: str) -> Iterator[tuple[str, Payload]]:
    """(place, payload) for every row of a save_to_disk folder; split: which of a folder of
    several."""
    import pyarrow as pa

    def batches() -> Iterator[Any]:
        for file in folder_files(folder, split, key):
            with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
                for batch in stream:
                    yield from (
                        batch.slice(start, BATCH) for start in range(0, batch.num_rows, BATCH)
                    )

    return table_rows(batches(), f"{key} cannot be read as a Hugging Face dataset", str(folder))


def folder_files(folder: Path, split: str, key: str) -> list[Path]:
    """The Arrow files of a save_to_disk folder. Raises UserError where it is none, or a choice is
    left."""
    if (folder / SPLITS).is_file():
        names = _read_json(folder / SPLITS, "splits", key)
        folder = folder / choose_split(names, split, str(folder), key)
    elif split:
        raise UserError(
            f"{key} names a split of a dataset that has none",
            where=f"{folder}#{split}",
            found=f"no {SPLITS}",
            expected="a folder of several splits",
            next=f"{key}={folder}",
        )
    if not (folder / STATE).is_file():
        raise UserError(
            f"{key} is not a file, and not a Hugging Face dataset",
            where=str(folder),
            found=f"a folder without {STATE}",
            expected="a JSONL, Parquet or CSV file, or a folder written by datasets' save_to_disk",
            next=f"ls {folder}",
        )
    return [
        folder / str(file["filename"]) for file in _read_json(folder / STATE, "_data_files", key)
    ]


def choose_split(names: list[str], split: str, source: str, key: str) -> str:
    """The split that is asked for, or the only one. Raises UserError with the choice."""
    if split in names:
        return split
    if not split and len(names) == 1:
        return names[0]
    found = f"no split {split!r}" if split else f"{len(names)} splits and none chosen"
    raise UserError(
        f"{key} names no split of its dataset",
        where=source,
        found=found,
        expected=f"one of {', '.join(names[:12])}",
        next=f"{key}='{source}#{names[0]}'" if names else "",
    )


def _read_json(file: Path, field: str, key: str) -> list[Any]:
    try:
        value = json.loads(file.read_bytes())[field]
    except (ValueError, KeyError, TypeError) as error:
        what, found = (
            f"{key} cannot be read as a Hugging Face dataset",
            f"{type(error).__name__}: {error}",
        )
        raise UserError(
            what, where=str(file), found=found, expected=f"JSON with {field!r}"
        ) from None
    if not isinstance(value, list):
        raise UserError(
            f"{key} cannot be read as a Hugging Face dataset",
            where=f"{file}, {field}",
            expected="a list",
        )
    return value


def table_rows(batches: Iterable[Any], mistake: str, where: str) -> Iterator[tuple[str, Payload]]:
    """(place, payload) for every row of some record batches or tables. mistake: what a damaged file
    is told as."""
    import pyarrow as pa

    number = 0
    try:
        for batch in batches:
            _refuse_twice(batch.schema.names)
            suspect = _suspect(batch)
            for payload in _batch_rows(batch):
                number += 1
                yield f":row {number}", _checked(payload) if suspect else payload
    except (pa.ArrowException, OSError, ValueError) as error:
        found = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(mistake, where=f"{where}, after row {number}", found=found) from None


def _refuse_twice(names: list[str]) -> None:
    """A row would hold one of two columns of a name, and nobody could tell which."""
    if len(set(names)) < len(names):
        raise ValueError(f"two columns {next(name for name in names if names.count(name) > 1)!r}")


def _suspect(batch: Any) -> bool:
    """Whether its rows must be looked at one by one. Raises ArrowException where the memory makes
    no sense: mapped files are believed, and a wrong offset would end the process."""
    unreadable = False in [_is_text_utf8(column) for column in batch.columns]
    return (
        unreadable
        or batch.nbytes > MAX_ROW_BYTES
        or any(_is_suspect(field.type) for field in batch.schema)
    )


def _is_text_utf8(column: Any) -> bool:
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        return False
    return True


def _is_suspect(kind: Any, depth: int = 1) -> bool:
    """Whether a column of this type can hold more than text, whole numbers, lists and objects, or
    nests deep."""
    from pyarrow import types

    if depth > 8 or types.is_map(kind):
        return True
    if kind.num_fields:
        return any(_is_suspect(kind.field(i).type, depth + 1) for i in range(kind.num_fields))
    plain = (
        types.is_string,
        types.is_large_string,
        types.is_integer,
        types.is_boolean,
        types.is_null,
    )
    return not any(is_plain(kind) for is_plain in plain)


def _checked(payload: Payload) -> Payload:
    if isinstance(payload, RowError):
        return payload
    try:
        values = {name: _json_value(value, name) for name, value in payload[0].items()}
        refuse_bad_leaf(values)
    except RowError as error:
        return error
    return values, ""


def _json_value(value: Any, field: str) -> Any:
    """A value as JSON can write it: decimals and times become their text, in which a decimal keeps
    its digits."""
    match value:
        case None | str() | int() | float():
            return value
        case dict():
            return {name: _json_value(child, field) for name, child in value.items()}
        case list() | tuple():  # Arrow's maps are lists of pairs
            return [_json_value(child, field) for child in value]
        case bytes():
            found, advice = (
                f"{len(value)} bytes that are no text",
                f"leave the column {field!r} out of the data",
            )
            raise RowError(found, "text, numbers, lists or objects", field=field, next=advice)
        case _:
            return str(value)


def _batch_rows(batch: Any) -> Iterator[Payload]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError:  # Arrow does not check strings; look for the rows one by one
        return (_row_or_error(batch.slice(i, 1)) for i in range(batch.num_rows))
    return ((values, "") for values in rows)


def _row_or_error(row: Any) -> Payload:
    values = {}
    for name in row.schema.names:
        try:
            values[name] = row.column(name)[0].as_py()
        except UnicodeDecodeError as error:
            return RowError(f"invalid UTF-8 at byte {error.start + 1}", "UTF-8 text", field=name)
    return values, ""
