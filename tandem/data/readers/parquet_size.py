"""The size of a Parquet file's rows, before they are made: a file of 1 KiB can repeat one text a
million times.

The file's own numbers count a repeated value once. Here every repetition counts: by the longest
entry of the column's dictionary or, if that is too much, by every row's entry. Knows Parquet's
encodings. Does not know what a row means.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

ROOM = 256 << 20  # bytes that the rows of any file may fill
GROWTH = 200  # plus so many times the file's size; well compressed texts grow tenfold
NUMBER_BYTES = 8
DELTA_ROWS = 16  # that are decoded at a time


def check_size(path: Path) -> None:
    """Raise ValueError for a file whose rows are far larger than the file."""
    file = pq.ParquetFile(path)
    most, size = ROOM + GROWTH * path.stat().st_size, 0
    for group in range(file.metadata.num_row_groups):
        about = file.metadata.row_group(group)
        for number in range(about.num_columns):
            column = about.column(number)
            size += _at_least(column, file.schema.column(number).length or 0)
            if size <= most and column.physical_type == "BYTE_ARRAY" and column.has_dictionary_page:
                size += _repeated(path, group, column, most - size)
            elif size <= most and any("DELTA" in encoding for encoding in column.encodings):
                size += _decoded(path, group, column, most - size)
            if size > most:
                name, size_now = column.path_in_schema, path.stat().st_size
                raise ValueError(
                    f"{size_now:,} bytes that become more than {most:,} in column {name!r}"
                )


def _at_least(column: Any, width: int) -> int:
    """Count the bytes of the values without repetition. width: bytes of a value, 0 if it varies."""
    return max(column.total_uncompressed_size, (width or NUMBER_BYTES) * column.num_values)


def _decoded(path: Path, group: int, column: Any, room: int) -> int:
    """Count the bytes of a column's texts by reading a few at a time: each may be stored as its
    difference to the one before."""
    total = 0
    batches = pq.ParquetFile(path).iter_batches(
        batch_size=DELTA_ROWS,
        row_groups=[group],
        columns=[column.path_in_schema],
        use_threads=False,
    )
    for batch in batches:
        total += batch.nbytes
        if total > room:
            break
    return total


def _repeated(path: Path, group: int, column: Any, room: int) -> int:
    """Count the bytes of a column's texts with every repetition, or bound them if the bound is
    within the room."""
    name = column.path_in_schema
    file = pq.ParquetFile(path, read_dictionary=[name])
    total = 0
    for batch in file.iter_batches(
        batch_size=1024, row_groups=[group], columns=[name], use_threads=False
    ):
        texts = _dictionary(batch.column(0))
        lengths = pc.binary_length(texts.dictionary)
        if not total and (bound := column.num_values * (pc.max(lengths).as_py() or 0)) <= room:
            return bound
        total += pc.sum(lengths.take(texts.indices)).as_py() or 0
        if total > room:
            break
    return total


def _dictionary(column: Any) -> Any:
    """Return the dictionary of texts in a column, also inside of lists and objects."""
    while not pa.types.is_dictionary(column.type):
        if not pa.types.is_nested(column.type):
            raise ValueError("two columns of one name")
        column = column.flatten()[0] if pa.types.is_struct(column.type) else column.flatten()
    return column
