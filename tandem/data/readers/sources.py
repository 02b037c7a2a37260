"""Where rows come from: a file, a folder or a name of the hub, told apart by what is there and by
the suffix.

    problems.jsonl   chats.parquet   pairs.csv   folder   folder#train   openai/gsm8k:main#train

Knows names. Does not know what is in the rows; the formats are in text_rows.py, arrow_rows.py and
hub.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.data.readers.arrow_rows import folder_files, folder_rows, parquet_rows
from tandem.data.readers.hub import hub_files, hub_rows, is_hub_name
from tandem.data.readers.text_rows import Payload, csv_rows, jsonl_rows
from tandem.runtime.errors import UserError

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
EXPECTED = (
    "a JSONL, Parquet or CSV file, a Hugging Face dataset folder, or OWNER/NAME of one on the hub"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source's name, taken apart. Example: Source(path=Path("data/gsm8k"), split="train",
    on_hub=False)"""

    path: Path
    split: str
    on_hub: bool = False


def source_rows(name: str, key: str) -> Iterator[tuple[str, Payload]]:
    """(place, payload) for every row. key: the config key that names the source. Raises
    UserError."""
    source = _locate(name, key)
    if source.on_hub:
        return hub_rows(str(source.path), source.split, key)
    if source.path.is_dir():
        return folder_rows(source.path, source.split, key)
    match source.path.suffix:
        case ".parquet":
            return parquet_rows(source.path, key)
        case ".csv":
            return csv_rows(source.path, key)
        case _:
            return jsonl_rows(source.path, key)


def source_files(name: str, key: str) -> list[Path]:
    """The files that the rows of a source are in. Raises UserError."""
    source = _locate(name, key)
    if source.on_hub:
        return hub_files(str(source.path), source.split, key)
    return folder_files(source.path, source.split, key) if source.path.is_dir() else [source.path]


def _locate(name: str, key: str) -> Source:
    source = _split(name)
    if not name or not (source.on_hub or source.path.exists()):
        found = f"{name!r}, which does not exist" if name else "no path"
        advice = f"ls {source.path.parent}" if name else f"set {key}=FILE"
        raise UserError(
            f"{key} names no file", where=key, found=found, expected=EXPECTED, next=advice
        )
    if source.on_hub or source.path.is_dir():
        return source
    if not source.path.is_file():
        raise UserError(
            f"{key} is not a file", where=name, found="a device, or a pipe", expected=EXPECTED
        )
    if source.path.suffix not in SUFFIXES:
        expected = ".jsonl, .json (one object a line), .parquet or .csv"
        found, advice = (
            f"suffix {source.path.suffix!r}",
            "convert the file, or rename it if only its name is wrong",
        )
        raise UserError(
            f"{key} has an unknown format", where=name, found=found, expected=expected, next=advice
        )
    return source


def _split(name: str) -> Source:
    """What exists under the whole name is that; else the text behind the last # is a split."""
    base, mark, split = name.rpartition("#")
    if Path(name).exists() or not mark:
        base, split = name, ""
    on_hub = not Path(base).exists() and is_hub_name(base) and Path(base).suffix not in SUFFIXES
    return Source(path=Path(base), split=split, on_hub=on_hub)


def uid_prefixes(names: Sequence[str], key: str) -> list[str]:
    """What the uids of rows without one begin with: the file's name without suffix, and where that
    is not enough to tell two sources apart, as much more of the path as is. Raises UserError for a
    source that comes twice.

    Example: ["a/train.jsonl", "b/train.jsonl", "c.csv"] gives ["a/train.jsonl", "b/train.jsonl",
    "c"]
    """
    tails = [_tails(name) for name in names]
    for number, name in enumerate(names):
        if tails[number][-1] in [other[-1] for other in tails[:number]]:
            raise UserError(
                f"{key} names a source twice", where=key, found=name, expected="each source once"
            )
    return [_first_alone(own, [other for other in tails if other is not own]) for own in tails]


def _tails(name: str) -> list[str]:
    """Longer and longer ends of a source's path: its stem, its name, the folder and its name,
    ..."""
    source = _split(name)
    split = f"#{source.split}" if source.split else ""
    parts = source.path.parts
    stem = source.path.stem if source.path.suffix in SUFFIXES else source.path.name
    return [stem + split, *("/".join(parts[-count:]) + split for count in range(1, len(parts) + 1))]


def _first_alone(own: list[str], others: list[list[str]]) -> str:
    longest = max(map(len, [own, *others]))
    tails = zip(*[_padded(each, longest) for each in (own, *others)], strict=True)
    return next(tail for tail, *rest in tails if tail not in rest)


def _padded(tails: list[str], length: int) -> list[str]:
    return tails + tails[-1:] * (length - len(tails))
