"""Rows of Arrow tables: Parquet files, folders that Hugging Face's `datasets` wrote with
save_to_disk, and data sets by their name on the hub, "openai/gsm8k:main#train".

Maps tables or reads them batch by batch: of the file, only one batch is in memory. Only the hub
needs `datasets`, an extra. Does not know what a row means.
"""

import base64
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tandem.data.readers.row_errors import RowError
from tandem.data.readers.text_rows import Payload
from tandem.runtime.errors import UserError

BATCH = 1024  # rows
# in the name of a type: its values may be none of JSON's, or not the file's digits
_ODD = re.compile(
    "float|double|decimal|date|time|duration|interval|binary|map|dictionary|extension"
)
# in the folder of one split, and of several
STATE, SPLITS = "state.json", "dataset_dict.json"
# OWNER/NAME or OWNER/NAME:CONFIGURATION, without the split
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")


def parquet_rows(file: Path, key: str) -> Iterator[tuple[str, Payload]]:
    """Yield (place, payload) for every row."""
    import pyarrow.parquet as pq

    def batches() -> Iterator[Any]:
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
    if split or (folder / SPLITS).is_file():
        names = _read_json(folder / SPLITS, "splits", key)
        folder = folder / _choose_split(names, split, str(folder), key)
    files = _read_json(folder / STATE, "_data_files", key)
    return [folder / str(file["filename"]) for file in files]


def _choose_split(names: list[str], split: str, source: str, key: str) -> str:
    """Return the split asked for, or the only one. Raises UserError that lists the splits."""
    if split in names:
        return split
    if not split and len(names) == 1:
        return names[0]
    raise UserError(
        f"{key} names no split of its dataset",
        where=source,
        found=f"no split {split!r}" if split else f"{len(names)} splits and none chosen",
        expected=f"one of {', '.join(names[:12])}",
        next=f"{key}='{source}#{names[0]}'" if names else "",
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


def hub_rows(name: str, split: str, key: str) -> Iterator[tuple[str, Payload]]:
    """Yield (place, payload) for every row, downloaded once and mapped from the cache."""
    tables = _load(name, split, key).with_format("arrow").iter(batch_size=BATCH)
    batches = (batch for table in tables for batch in table.to_batches())
    return table_rows(batches, f"{key} cannot be read from the hub", name)


def hub_files(name: str, split: str, key: str) -> list[Path]:
    """Return the files of its rows in the cache."""
    return [Path(file["filename"]) for file in _load(name, split, key).cache_files]


def _load(name: str, split: str, key: str) -> Any:
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
    from datasets.exceptions import DatasetsError

    path, _, configuration = name.partition(":")
    datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(path, configuration or None)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        found = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{key} names no file, and no dataset of the hub that can be had",
            where=f"{key}, {name!r}",
            found=found,
            expected="a file, or a dataset that is on the hub or in its cache (HF_HUB_OFFLINE=1)",
            next=f"ls {Path(name).parent}",
        ) from None
    return splits[_choose_split([str(each) for each in splits], split, name, key)]


def table_rows(batches: Iterable[Any], mistake: str, where: str) -> Iterator[tuple[str, Payload]]:
    """Yield (place, payload) for every row of record batches. mistake: the message for a damaged
    file."""
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
    """Yield the rows of a batch. Raises ArrowException for wrong offsets, which would end the
    process: Arrow does not check mapped files."""
    import pyarrow as pa

    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        if batch.num_rows == 1:
            yield RowError("invalid UTF-8", "UTF-8 text")
        else:
            for i in range(batch.num_rows):
                yield from _batch_rows(batch.slice(i, 1))
        return
    odd = [
        (name, str(column.type))
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
        if _ODD.search(str(column.type)) or _is_padded(column)
    ]
    for row in batch.to_pylist():
        try:
            for name, kind in odd:
                row[name] = _json_value(row[name], kind)
            yield row, ""
        except RowError as error:
            error.field = name
            yield error


def _is_padded(array: Any) -> bool:
    """Tell whether an object in an array has a null key: Arrow gives all the same keys."""
    from pyarrow import types

    if types.is_struct(array.type):
        return any(child.null_count or _is_padded(child) for child in array.flatten())
    return types.is_nested(array.type) and _is_padded(array.flatten())


def _json_value(value: Any, kind: str) -> Any:
    """Convert a value of a column of this Arrow type to one that JSON can write, without null keys.
    Decimals and times become their text, which keeps all digits of a decimal; a float32 becomes the
    number with the same shortest text, 0.1 and not 0.10000000149011612."""
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
