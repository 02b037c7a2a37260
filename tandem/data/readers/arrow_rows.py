"""Rows of Arrow tables: Parquet files, and folders that Hugging Face's `datasets` wrote with
save_to_disk.

Maps tables or reads them batch by batch: of the file, only one batch is in memory. Knows Arrow and
the folder's layout. Does not need `datasets`, and does not know what a row means.
"""

import base64
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tandem.data.readers.row_errors import MAX_ROW_BYTES, RowError, refuse_bad_leaf
from tandem.data.readers.text_rows import Payload
from tandem.runtime.errors import UserError

BATCH = 1024  # rows
# in the folder of one split, and of several
STATE, SPLITS = "state.json", "dataset_dict.json"


def parquet_rows(file: Path, key: str) -> Iterator[tuple[str, Payload]]:
    """Yield (place, payload) for every row."""
    import pyarrow.parquet as pq

    from tandem.data.readers.parquet_size import check_size

    def batches() -> Iterator[Any]:
        _refuse_equal_names(pq.read_schema(file).names)
        check_size(file)
        # One thread, because the thread count of the process is fixed; it is fast enough.
        yield from pq.ParquetFile(file).iter_batches(batch_size=BATCH, use_threads=False)

    return table_rows(batches(), f"{key} cannot be read as Parquet", str(file))


def folder_rows(folder: Path, split: str, key: str) -> Iterator[tuple[str, Payload]]:
    """Yield (place, payload) for every row of a save_to_disk folder. split: its name if there are
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
    """Return the Arrow files of a save_to_disk folder. Raises UserError if it is another folder, or
    the split is not clear."""
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
    files = _read_json(folder / STATE, "_data_files", key)
    return [folder / str(file["filename"]) for file in files]


def choose_split(names: list[str], split: str, source: str, key: str) -> str:
    """Return the split asked for, or the only one. Raises UserError that lists the splits."""
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
    what = f"{key} cannot be read as a Hugging Face dataset"
    try:
        value = json.loads(file.read_bytes())[field]
    except (ValueError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise UserError(
            what, where=str(file), found=found, expected=f"JSON with {field!r}"
        ) from None
    if not isinstance(value, list):
        raise UserError(what, where=f"{file}, {field}", expected="a list")
    return value


def table_rows(batches: Iterable[Any], mistake: str, where: str) -> Iterator[tuple[str, Payload]]:
    """Yield (place, payload) for every row of record batches or tables. mistake: the message for a
    damaged file."""
    import pyarrow as pa

    number = 0
    try:
        for batch in batches:
            _refuse_equal_names(batch.schema.names)
            must_check = _must_check_rows(batch)
            for payload in _batch_rows(batch):
                number += 1
                yield f":row {number}", _checked(payload) if must_check else payload
    except (pa.ArrowException, OSError, ValueError) as error:
        found = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(mistake, where=f"{where}, after row {number}", found=found) from None


def _refuse_equal_names(names: list[str]) -> None:
    """Raise ValueError for two columns of one name: a row would hold either."""
    if len(set(names)) < len(names):
        raise ValueError(f"two columns {next(name for name in names if names.count(name) > 1)!r}")


def _must_check_rows(batch: Any) -> bool:
    """Tell whether the rows must be checked one by one. Raises ArrowException for wrong offsets,
    which would end the process: Arrow does not check mapped files."""
    is_utf8 = [_is_text_utf8(column) for column in batch.columns]
    if not all(is_utf8) or batch.nbytes > MAX_ROW_BYTES:
        return True
    return not all(_is_plain(field.type) for field in batch.schema)


def _is_text_utf8(column: Any) -> bool:
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        return False
    return True


def _is_plain(kind: Any, depth: int = 1) -> bool:
    """Tell whether a column of this type holds nothing but text, whole numbers, and shallow lists
    and objects of them."""
    from pyarrow import types

    if depth > 8 or types.is_map(kind):
        return False
    if kind.num_fields:
        return all(_is_plain(kind.field(i).type, depth + 1) for i in range(kind.num_fields))
    is_text = types.is_string(kind) or types.is_large_string(kind)
    return is_text or types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind)


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
    """Convert a value to one that JSON can write. Decimals and times become their text, which keeps
    all digits of a decimal."""
    match value:
        case None | str() | int() | float():
            return value
        case {"bytes": bytes() as data}:  # an image of datasets
            return f"data:;base64,{base64.b64encode(data).decode()}"
        case dict():
            return {name: _json_value(child, field) for name, child in value.items()}
        case list() | tuple():  # Arrow's maps are lists of pairs
            return [_json_value(child, field) for child in value]
        case bytes():
            raise RowError(
                f"{len(value)} bytes that are no text",
                "text, numbers, lists or objects",
                field=field,
                next=f"leave the column {field!r} out of the data",
            )
        case _:
            return str(value)


def _batch_rows(batch: Any) -> Iterator[Payload]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError:  # Arrow does not check strings: find the rows
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
