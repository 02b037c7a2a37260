"""Values that a run of same_bits.py left in its folder, and where those of two runs first differ.

Reads metrics, episodes, ledger, checkpoints and exported models under their old names, as
same_bits_runs.py lists what is renamed. Does not know how a run is made.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from same_bits_runs import RENAMED_COLUMNS, RENAMED_METRICS, RENAMED_SETTINGS

Row = dict[str, Any]
Facts = dict[tuple[int, int, str, str], str]  # (step, order within it, file, key) -> value


class Left:
    """Files of a run folder, under the old names."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.metrics = [old_names(row, RENAMED_METRICS) for row in self.rows("metrics.jsonl")]
        self.episodes = [row for path in self.files("episodes/train_*") for row in read_table(path)]
        self.updates = read_state(self.files("checkpoints/*/state.json")[-1])["optimizer_steps"]
        self.versions = [set(row["weight_versions"]) - {-1} for row in self.episodes]

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.folder.glob(pattern))

    def lines(self, name: str) -> list[bytes]:
        return (self.folder / name).read_bytes().splitlines()

    def rows(self, name: str) -> list[Row]:
        return [json.loads(line) for line in self.lines(name)]

    def most(self, metric: str) -> float:
        return max(row[metric] for row in self.metrics if metric in row)

    def tensors(self, pattern: str) -> set[str]:
        return {name for path in self.files(pattern) for name in read_tensors(path)}

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.episodes]


def facts(left: Left) -> Facts:
    """Everything that must be equal."""
    found: Facts = {}
    renamed = bool(RENAMED_COLUMNS or RENAMED_SETTINGS)

    def put(step: int, order: int, name: str, values: Row, data: bytes = b"") -> None:
        found.update({(step, order, name, key): str(value) for key, value in values.items()})
        if data:
            found[step, order + 1, name, "all its bytes"] = short_hash(data)

    for path in left.files("episodes/*"):
        step = int(path.stem.split("_step_")[1][:6])
        put(step, 0, path.name, read_journal(path), b"" if renamed else path.read_bytes())
    lines = left.lines("metrics.jsonl")
    for row, line in zip(left.metrics, lines, strict=True):
        put(row["step"], 2, "metrics.jsonl", row, b"" if RENAMED_METRICS else line)
    for row in left.rows("ledger.jsonl"):
        row = old_names(row, RENAMED_COLUMNS)
        of_names = {"metrics": bool(RENAMED_METRICS), "weights": False, "step": False}
        kept = {key: value for key, value in row.items() if not of_names.get(key, renamed)}
        put(row["step"], 4, "ledger.jsonl", kept)
    for path in [*left.files("checkpoints/*/*"), *left.files("hf/*/*")]:
        step, name = int(path.parent.name[-6:]), str(path.relative_to(left.folder))
        if path.suffix == ".safetensors":
            put(step, 6, name, read_tensors(path), path.read_bytes())
        elif path.name == "state.json":
            put(step, 6, name, read_state(path))
        elif path.name in ("config.json", "tokenizer.json", "chat_template.jinja"):
            put(step, 6, name, {}, path.read_bytes())
    return found


def read_journal(path: Path) -> Row:
    """Every value of every row, and the note in the file's metadata."""
    found: Row = {}
    for number, row in enumerate(read_table(path)):
        found |= {f"row {number:03}, {key}": value for key, value in row.items()}
    for name, text in (pq.read_schema(path).metadata or {}).items():
        note = old_names(json.loads(text), RENAMED_COLUMNS)
        if RENAMED_SETTINGS:
            note.pop("run", None)  # a hash of all settings
        found[f"note {name.decode()}"] = note
    return found


def read_table(path: Path) -> list[Row]:
    return [old_names(row, RENAMED_COLUMNS) for row in pq.ParquetFile(path).read().to_pylist()]


def read_state(path: Path) -> Row:
    return old_names(json.loads(path.read_bytes()), RENAMED_COLUMNS | RENAMED_SETTINGS)


def read_tensors(path: Path) -> Row:
    """Type, shape and hash by name. A file is eight bytes of length, a header in JSON, the data."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = (start + at for at in entry["data_offsets"])
            found[name] = f"{entry['dtype']} {entry['shape']} {short_hash(data[first:last])}"
    return found


def old_names(value: Any, table: dict[str, str]) -> Any:
    """The value with old names for the keys of its dictionaries."""
    if not (table and isinstance(value, dict)):
        return value
    names, renamed = {new: old for old, new in table.items() if new}, {}
    for key, inner in value.items():
        head, slash, tail = key.partition("/")
        renamed[names.get(key, names.get(head, head) + slash + tail)] = old_names(inner, table)
    return renamed


def first_difference(one: Facts, other: Facts) -> str:
    """Return the first difference with both values; empty if there is none."""
    differ = [place for place in one.keys() | other.keys() if one.get(place) != other.get(place)]
    if not differ:
        return ""
    step, _, name, key = place = min(differ)
    a, b = (side.get(place, "nothing") for side in (one, other))
    same = len(os.path.commonprefix([a, b]))  # noqa: RUF071
    start = max(0, same - 20)
    shown = " | ".join("..." * (start > 0) + value[start : start + 80] for value in (a, b))
    return f"step {step}, {name}, {key}: {shown}"


def short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
