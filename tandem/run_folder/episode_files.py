"""The journal: every episode of a step in one Parquet file, one row an episode, written before it
is trained on.

    episodes/train_step_000012.parquet      import pyarrow.parquet; or in DuckDB: select uid, reward, text from it

Columns are plain: arrays are lists, chats and metadata are JSON text. The same episodes give the
same bytes, in Parquet and as lines of JSON. A `note` of whoever writes stands in the file's
metadata. It does not know how an episode came about or what it is used for; recall.py reads a run's
own files back.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tandem.runtime.disk import DISK, Disk, disk_errors, write_atomic
from tandem.runtime.errors import UserError
from tandem.types import Array, Episode, Group, Problem

_ARRAYS = {
    "tokens": np.int64,
    "loss_mask": np.bool_,
    "engine_logprobs": np.float32,
    "weight_versions": np.int32,
    "penalties": np.float32,
}
_SCALARS = {
    "key": pa.uint64(),
    "num_prompt_tokens": pa.int64(),
    "stop_reason": pa.string(),
    "env_error": pa.string(),
    "masked": pa.bool_(),
    "reward": pa.float64(),
    "reward_error": pa.string(),
}
# follow from the others; for whoever reads the file
_SEEN = {"text": pa.string(), "num_turns": pa.int64()}
_NOTE = b"tandem"
_MAPS = ("reward_parts", "given")
_JSON = ("messages", "metadata", "opening", "tools", "transcript")

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group", pa.int64()),  # place of the problem in the step
        (
            "outcome",
            pa.string(),
        ),  # Group.outcome: trained here, carried to the next step, without signal, or unfinished
        ("uid", pa.string()),
        ("sample_index", pa.int64()),
        ("category", pa.string()),
        ("answer", pa.string()),
        *((name, pa.string()) for name in _JSON),  # transcript: Episode.messages
        *_SCALARS.items(),
        *_SEEN.items(),
        *((name, pa.map_(pa.string(), pa.float64())) for name in _MAPS),
        *((name, pa.list_(pa.from_numpy_dtype(kind))) for name, kind in _ARRAYS.items()),
    ]
)
# Where values repeat; of the others a dictionary would be as large as they are.
_DICTIONARY = [
    "outcome",
    "uid",
    "category",
    "answer",
    "messages",
    "metadata",
    "opening",
    "tools",
    "stop_reason",
    "env_error",
    "reward_error",
]


def write_episodes(
    folder: Path,
    step: int,
    groups: Sequence[Group],
    kind: str = "train",
    *,
    note: Any = None,
    part: str = "",
    disk: Disk = DISK,
) -> Path:
    """Write `folder/<kind>_step_N.parquet`, durable on return; a file that is there is replaced.
    Raises UserError.

    note: JSON for the file's metadata; part: what follows N in the name of a file of some of a
    step's episodes.
    """
    path = episode_file(folder, step, kind, part)
    table = _table(step, groups)
    if note is not None:
        table = table.replace_schema_metadata(
            {_NOTE: json.dumps(note, allow_nan=False, sort_keys=True)}
        )
    sink = pa.BufferOutputStream()
    pq.write_table(
        table, sink, compression="zstd", use_dictionary=_DICTIONARY, write_page_checksum=True
    )
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, sink.getvalue().to_pybytes(), disk)
    return path


def episode_file(folder: Path, step: int, kind: str = "train", part: str = "") -> Path:
    return folder / f"{kind}_step_{step:06d}{part}.parquet"


def episode_lines(step: int, groups: Sequence[Group]) -> bytes:
    """The journal's columns as JSONL, an object an episode; chats, metadata and reward parts are
    objects, not text.

    A float32 is written as the double of its value, and what JSON has no number for (NaN,
    infinities) as null.
    """
    rows = (_plain(row) for row in _table(step, groups).to_pylist())
    return b"".join(
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n" for row in rows
    )


def read_episodes(path: Path) -> list[Episode]:
    """The episodes as they were written, to the bit, in their order. Raises UserError for a damaged
    file."""
    return _episodes(_read(path))


def read_groups(path: Path, problems: Mapping[str, Problem]) -> list[Group]:
    """The groups of a file, in their order. Raises UserError for a damaged file, and for one of
    other problems."""
    members: dict[int, list[Episode]] = defaultdict(list)
    outcomes: dict[int, str] = {}
    for group, outcome, episode in read_numbered(path):
        members[group].append(episode)
        outcomes[group] = outcome
    if unknown := {e[0].uid for e in members.values()} - problems.keys():
        raise UserError(
            "the episodes are of problems that the data does not have",
            where=str(path),
            found=", ".join(sorted(unknown)[:3]),
            expected="problems of the run's data",
            next="restore the run's data",
        )
    return [
        Group(problem=problems[e[0].uid], episodes=tuple(e), outcome=outcomes[g])
        for g, e in members.items()
    ]


def read_numbered(path: Path) -> list[tuple[int, str, Episode]]:
    """(number of the group, its outcome, episode) in their order. Raises UserError for a damaged
    file."""
    table = _read(path)
    places = (table.column(name).to_pylist() for name in ("group", "outcome"))
    return list(zip(*places, _episodes(table), strict=True))


def read_note(path: Path) -> Any:
    """What its writer noted in the file; None where there is no such file, or no note in it."""
    if not path.exists():
        return None
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    return json.loads(metadata[_NOTE]) if _NOTE in metadata else None


def _episodes(table: pa.Table) -> list[Episode]:
    columns: dict[str, list[Any]] = {
        **{name: table.column(name).to_pylist() for name in ("uid", "sample_index", *_SCALARS)},
        **{
            name: _split(table.column(name).combine_chunks(), kind)
            for name, kind in _ARRAYS.items()
        },
        **{name: [dict(row) for row in table.column(name).to_pylist()] for name in _MAPS},
        **{
            field: [tuple(json.loads(text)) for text in table.column(name).to_pylist()]
            for field, name in (
                ("messages", "transcript"),
                ("opening", "opening"),
                ("tools", "tools"),
            )
        },
    }
    return [
        Episode(**{name: values[row] for name, values in columns.items()})
        for row in range(table.num_rows)
    ]


def cut_episodes(folder: Path, after_step: int) -> list[Path]:
    """Remove the files of later steps, of every kind, which a resumed run makes again; returns what
    was removed."""
    unfinished = set(folder.glob(".tmp-*"))  # of a killed write
    later = [
        path
        for path in sorted(set(folder.glob("*.parquet")) - unfinished)
        if _step(path) > after_step
    ]
    with disk_errors(folder):
        for path in [*later, *unfinished]:
            path.unlink()
    return later


def _step(path: Path) -> int:
    match = re.fullmatch(r".*_step_(\d+)(_\d+)*", path.stem)
    return int(match[1]) if match else -1


def _table(step: int, groups: Sequence[Group]) -> pa.Table:
    rows = [
        (index, group.problem, episode)
        for index, group in enumerate(groups)
        for episode in group.episodes
    ]
    for _, problem, episode in rows:
        if episode.uid != problem.uid:
            raise ValueError(
                f"an episode of problem {episode.uid} stands in the group of problem {problem.uid}"
            )
    columns = {
        "step": [step] * len(rows),
        "group": [index for index, _, _ in rows],
        "outcome": [groups[index].outcome for index, _, _ in rows],
        **{
            name: [getattr(problem, name) for _, problem, _ in rows]
            for name in ("uid", "category", "answer")
        },
        "messages": [json.dumps(list(problem.messages)) for _, problem, _ in rows],
        "metadata": [json.dumps(problem.metadata, default=str) for _, problem, _ in rows],
        "transcript": [json.dumps(list(episode.messages)) for _, _, episode in rows],
        **{
            name: [json.dumps(list(getattr(e, name))) for _, _, e in rows]
            for name in ("opening", "tools")
        },
        **{
            name: [list(getattr(episode, name).items()) for _, _, episode in rows] for name in _MAPS
        },
        **{
            name: [getattr(episode, name) for _, _, episode in rows]
            for name in ("sample_index", *_SCALARS, *_SEEN)
        },
    }
    arrays = {
        name: _lists([getattr(e, name) for _, _, e in rows], kind) for name, kind in _ARRAYS.items()
    }
    plain = {name: pa.array(values, SCHEMA.field(name).type) for name, values in columns.items()}
    return pa.table({name: {**plain, **arrays}[name] for name in SCHEMA.names}, schema=SCHEMA)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    texts = {name: json.loads(row[name]) for name in _JSON}
    logprobs = [value if math.isfinite(value) else None for value in row["engine_logprobs"]]
    return {
        **row,
        **texts,
        **{name: dict(row[name]) for name in _MAPS},
        "engine_logprobs": logprobs,
    }


def _lists(arrays: Sequence[Array], kind: type[np.generic]) -> pa.ListArray:
    """A list column from arrays of the column's own dtype; another dtype is refused, as a cast
    could change a value."""
    dtype = np.dtype(kind)
    for array in arrays:
        if array.dtype != dtype or array.ndim != 1:
            raise TypeError(
                f"an array of an episode is {array.dtype} {list(array.shape)}; expected {dtype} [T]"
            )
    offsets = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(np.concatenate([np.empty(0, dtype), *arrays]))
    )


def _split(column: pa.ListArray, kind: type[np.generic]) -> list[Array]:
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy(zero_copy_only=False).astype(kind, copy=True)
    return [values[start:stop] for start, stop in pairwise(offsets)]


def _read(path: Path) -> pa.Table:
    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read(use_threads=False)
        return table.select(SCHEMA.names)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        "the episodes of a step cannot be read",
        where=str(path),
        found=str(error).splitlines()[0],
        expected="the Parquet file as Tandem wrote it",
        next="restore it; or, without rollout.staleness, remove it if it is after the last checkpoint: its step is made again",
    )
