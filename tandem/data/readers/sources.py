"""The source of rows: a file, a folder or a name of the hub, by what exists and by the suffix.

    problems.jsonl   chats.parquet   pairs.csv   folder   folder#train   openai/gsm8k:main#train

Knows names. Does not know the contents of the rows; the formats are in text_rows.py and
arrow_rows.py.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tandem.data.readers.arrow_rows import (
    HUB_NAME,
    folder_files,
    folder_rows,
    hub_files,
    hub_rows,
    parquet_rows,
)
from tandem.data.readers.text_rows import COMPRESSED, Payload, csv_rows, jsonl_rows
from tandem.runtime.errors import UserError
from tandem.runtime.wording import look_for

_TEXT = {".jsonl": jsonl_rows, ".json": jsonl_rows, ".csv": csv_rows, ".tsv": csv_rows}
READERS = {suffix + end: rows for suffix, rows in _TEXT.items() for end in ("", *COMPRESSED)}
READERS[".parquet"] = parquet_rows
EXPECTED = (
    "a JSONL, Parquet or CSV file, a Hugging Face dataset folder, or OWNER/NAME of one on the hub"
)


class Source(NamedTuple):
    """A source's name, taken apart."""

    path: Path
    split: str
    on_hub: bool
    suffix: str  # of the file's format, and that of its compression; "" if it has no such


def source_rows(name: str, key: str) -> Iterator[tuple[str, Payload]]:
    """Yield (place, payload) for every row. key: the config key that names the source. Raises
    UserError."""
    source = _locate(name, key)
    if source.on_hub:
        return hub_rows(str(source.path), source.split, key)
    if source.path.is_dir():
        return folder_rows(source.path, source.split, key)
    return READERS[source.suffix](source.path, key)


def source_files(name: str, key: str) -> list[Path]:
    """Return the files that the rows of a source are in. Raises UserError."""
    source = _locate(name, key)
    if source.on_hub:
        return hub_files(str(source.path), source.split, key)
    return folder_files(source.path, source.split, key) if source.path.is_dir() else [source.path]


def _locate(name: str, key: str) -> Source:
    source = _split(name)
    if not name or not (source.on_hub or source.path.exists()):
        raise UserError(
            f"{key} names no file",
            where=key,
            found=f"{name!r}, which does not exist" if name else "no path",
            expected=EXPECTED,
            next=look_for(source.path) if name else f"set {key}=FILE",
        )
    if source.on_hub or source.path.is_dir():
        return source
    if not source.suffix or not source.path.is_file():
        suffix = f"suffix {''.join(source.path.suffixes[-2:])!r}"
        raise UserError(
            f"{key} has an unknown format",
            where=name,
            found=suffix if source.path.is_file() else "a device, or a pipe",
            expected=".jsonl, .json (one object a line), .csv or .tsv, also with .gz or .zst; "
            "or .parquet",
            next="convert the file, or rename it if only its name is wrong",
        )
    return source


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
    sources = [_split(name) for name in names]
    longest = max(len(source.path.parts) for source in sources)
    ends = [[_end(source, parts) for parts in range(longest + 1)] for source in sources]
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


def _end(source: Source, parts: int) -> str:
    """Join the last `parts` parts of a source's path; 0: the last one without its suffix."""
    path = source.path
    end = "/".join(path.parts[-parts:]) if parts else path.name.removesuffix(source.suffix)
    return f"{end}#{source.split}" if source.split else end
