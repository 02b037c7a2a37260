"""Rows of tables: CSV, Parquet, folders of Hugging Face's `datasets`, data sets of its hub.

For data in other formats than JSONL; docs/guide/data.md lists them. It plugs in as tables of
tandem/registry.py, which data/readers.py asks. Extra: `datasets`, for folders and the hub.
"""

import base64
import csv
import math
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tandem.data.readers import Payload, Placed, RowError, Source, open_text, show
from tandem.model.config_file import hub_answers
from tandem.runtime.errors import UserError
from tandem.runtime.wording import counted

BATCH = 1024  # rows of a table
LONGEST_CELL = 16 << 20  # characters; a quote that never ends would take the rest of a file


def csv_rows(source: Source, key: str) -> Placed:
    """Yield the records below the header. All values are text, and an empty cell is null. The mark
    between cells is the one that gives the header most names.

    Reading ends at a cell that is too long and at a quote that never ends: the start of the next
    record is unknown.
    """
    file = source.path
    csv.field_size_limit(LONGEST_CELL)  # of the whole process: the module has no other setting
    marks = "\t" if ".tsv" in file.suffixes[-2:] and file.suffix != ".csv" else ",;\t"
    with open_text(file) as lines:
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
        return RowError(counted(len(cells), "cells"), f"{len(names)}, as in the header")
    try:
        "".join((*names, *cells)).encode()
    except UnicodeEncodeError:
        return RowError("invalid UTF-8", "UTF-8 text")
    return {name: cell or None for name, cell in zip(names, cells, strict=True)}, ""


# ---- Parquet, folders of `datasets`, the hub


def parquet_rows(source: Source, key: str) -> Placed:
    def batches() -> Iterator[Any]:
        import pyarrow.parquet as pq

        # One thread, because the thread count of the process is fixed; it is fast enough.
        yield from pq.ParquetFile(source.path).iter_batches(batch_size=BATCH, use_threads=False)

    return _table_rows(batches(), f"{key} cannot be read as Parquet", str(source.path))


def dataset_rows(source: Source, key: str) -> Placed:
    """Yield the rows of a data set of the hub, or of one that save_to_disk wrote."""
    tables = _dataset(source, key).with_format("arrow").iter(batch_size=BATCH)
    batches = (batch for table in tables for batch in table.to_batches())
    return _table_rows(batches, f"{key} cannot be read as a data set", str(source.path))


def dataset_files(source: Source, key: str) -> list[Path]:
    """Return the Arrow files of a data set. Raises UserError."""
    return [Path(file["filename"]) for file in _dataset(source, key).cache_files]


def _dataset(source: Source, key: str) -> Any:
    """Load a split of a data set, mapped from its files: of a folder, or of the hub's cache."""
    name = str(source.path)
    try:
        import datasets
    except ModuleNotFoundError:
        raise UserError(
            f"{key} is no file, and other data sets need the package datasets",
            where=key,
            found=repr(name),
            next="pip install 'tandem-rl[datasets]'",
        ) from None
    path, _, configuration = name.partition(":")
    datasets.disable_progress_bars()
    datasets.config.HF_HUB_OFFLINE |= source.on_hub and not hub_answers()
    try:
        if source.on_hub:
            splits = datasets.load_dataset(path, configuration or None)
        else:
            splits = datasets.load_from_disk(name)
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        raise UserError(
            f"{key} is no file, and no data set that can be had",
            where=f"{key}, {name!r}",
            found=(str(error).splitlines() or [type(error).__name__])[0],
            expected="a file, a folder written by datasets' save_to_disk, or a data set that is on "
            "the hub or in its cache (HF_HUB_OFFLINE=1)",
            next="fetch it where there is a network"
            if source.on_hub
            else f"ls {source.path.parent}",
        ) from None
    if not isinstance(splits, dict):  # one without a name
        splits = {"": splits}
    return splits[_choose_split([str(each) for each in splits], source, key)]


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
        next=f"{key}='{source.path}#{names[0]}'" if any(names) else "",
    )


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

    plain = types.is_string, types.is_large_string, types.is_integer, types.is_boolean
    odd = [f for f in batch.schema if not any(is_plain(f.type) for is_plain in plain)]
    for row in batch.to_pylist():
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
