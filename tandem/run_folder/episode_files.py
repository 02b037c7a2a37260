"""The journal: every episode of a step in one Parquet file, one row an episode, written before it
is trained on.

    episodes/train_step_000012.parquet      import pyarrow.parquet
                                            or in DuckDB: select uid, reward, text from it

Columns are plain: arrays are lists, chats and metadata are JSON text; `experts`, there with
rl.router_replay only, is bytes; `starts` is there with rollout.history = "template" only. The same
episodes give the same bytes, in Parquet and as lines of JSON. The file's metadata holds a `note` of
its writer. It does not know how an episode came about or what it is used for; journal.py reads a
run's own files back.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tandem.runtime.disk import disk_errors, write_atomic
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
EXPERTS = "experts"  # a column of bytes, in files with such episodes only; its field has the shape
STARTS = pa.field("starts", pa.list_(pa.int64()))
# follow from the others; for people who read the file
_DERIVED = {"text": pa.string(), "num_turns": pa.int64()}
_NOTE = b"tandem"
MAPS = ("reward_parts", "env_rewards")
JSON = ("messages", "metadata", "opening", "tools", "transcript")
_PROBLEM = ("uid", "category", "answer", "messages", "metadata")

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group", pa.int64()),  # place of the problem in the step
        # Group.outcome: trained here, carried to the next step, without signal, or unfinished
        ("outcome", pa.string()),
        ("uid", pa.string()),
        ("sample_index", pa.int64()),
        ("category", pa.string()),
        ("answer", pa.string()),
        *((name, pa.string()) for name in JSON),  # transcript: Episode.messages
        *_SCALARS.items(),
        *_DERIVED.items(),
        *((name, pa.map_(pa.string(), pa.float64())) for name in MAPS),
        *((name, pa.list_(pa.from_numpy_dtype(kind))) for name, kind in _ARRAYS.items()),
    ]
)
# Where values repeat; of the others a dictionary would be as large as they are.
_DICTIONARY = ["outcome", *_PROBLEM, "opening", "tools", "stop_reason", "env_error", "reward_error"]


def write_episodes(
    folder: Path,
    step: int,
    groups: Sequence[Group],
    kind: str = "train",
    *,
    note: Any = None,
    part: str = "",
) -> Path:
    """Write `folder/<kind>_step_N.parquet`, durable on return, in place of an existing file. Raises
    UserError.

    note: JSON for the file's metadata; part: the end of the name, after N, for a file with some of
    a step's episodes.
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
    write_atomic(path, sink.getvalue().to_pybytes())
    return path


def episode_file(folder: Path, step: int, kind: str = "train", part: str = "") -> Path:
    return folder / f"{kind}_step_{step:06d}{part}.parquet"


def read_episodes(path: Path) -> list[Episode]:
    """Read the episodes as they were written, to the bit, in their order. Raises UserError for a
    damaged file."""
    return _episodes(read_table(path, with_experts=True))


def read_groups(path: Path, problems: Mapping[str, Problem] | None = None) -> list[Group]:
    """Read the groups of a file, in their order; problems: those of the run's data by uid, None for
    the problems as the file has them.

    Raises UserError for a damaged or absent file, and for one of other problems.
    """
    table = read_table(path, with_experts=True)
    rows = table.select(["group", "outcome", *_PROBLEM]).to_pylist()
    groups: dict[int, tuple[dict[str, Any], list[Episode]]] = {}
    for row, episode in zip(rows, _episodes(table), strict=True):
        groups.setdefault(row["group"], (row, []))[1].append(episode)
    if problems is not None and (
        unknown := {row["uid"] for row, _ in groups.values()} - problems.keys()
    ):
        raise UserError(
            "the episodes are of problems that the data does not have",
            where=str(path),
            found=", ".join(sorted(unknown)[:3]),
            expected="problems of the run's data",
            next="restore the run's data",
        )
    found = []
    for row, episodes in groups.values():
        problem = (problems or {}).get(row["uid"]) or Problem(
            uid=row["uid"],
            messages=tuple(json.loads(row["messages"])),
            answer=row["answer"],
            category=row["category"],
            metadata=json.loads(row["metadata"]),
        )
        found.append(Group(problem=problem, episodes=tuple(episodes), outcome=row["outcome"]))
    return found


def read_note(path: Path) -> Any:
    """Read the note of a file's writer; None if there is no such file, or no note in it."""
    if not path.exists():
        return None
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    return json.loads(metadata[_NOTE]) if _NOTE in metadata else None


def _episodes(table: pa.Table) -> list[Episode]:
    arrays: dict[str, list[Array]] = {}
    for name, kind in _ARRAYS.items():
        column = table.column(name).combine_chunks()
        values = column.values.to_numpy(zero_copy_only=False).astype(kind, copy=True)
        arrays[name] = [values[start:stop] for start, stop in pairwise(column.offsets.to_numpy())]
    plain = table.select(
        ["uid", "sample_index", "opening", "tools", "transcript", *_SCALARS, *MAPS]
    )
    # of an episode without any, the default's shape
    episodes, experts = [], [np.zeros((0, 0, 0), np.int16)] * len(table)
    if EXPERTS in table.column_names:
        shape = json.loads(table.schema.field(EXPERTS).metadata[b"layers, k"])
        for number, part in enumerate(table.column(EXPERTS).to_pylist()):
            if part:
                experts[number] = np.frombuffer(part, "<i2").astype(np.int16).reshape(-1, *shape)
    starts = table.column(STARTS.name).to_pylist() if STARTS.name in table.column_names else []
    for number, row in enumerate(plain.to_pylist()):
        fields: dict[str, Any] = {
            **row,
            **{name: dict(row[name]) for name in MAPS},
            **{name: tuple(json.loads(row[name])) for name in ("opening", "tools")},
            **{name: column[number] for name, column in arrays.items()},
            "messages": tuple(json.loads(row["transcript"])),
            "experts": experts[number],
            "starts": tuple(starts[number] or ()) if starts else (),
        }
        del fields["transcript"]
        episodes.append(Episode(**fields))
    return episodes


def _table(step: int, groups: Sequence[Group]) -> pa.Table:
    episodes = [episode for group in groups for episode in group.episodes]
    rows = [
        _row(step, number, group, episode)
        for number, group in enumerate(groups)
        for episode in group.episodes
    ]
    experts = [episode.experts for episode in episodes]
    columns = {
        field.name: _lists([getattr(e, field.name) for e in episodes], _ARRAYS[field.name])
        if field.name in _ARRAYS
        else pa.array([row[field.name] for row in rows], field.type)
        for field in SCHEMA
    }
    table = pa.table(columns, schema=SCHEMA)
    if any(episode.starts for episode in episodes):
        starts = pa.array([list(episode.starts) for episode in episodes], STARTS.type)
        table = table.append_column(STARTS, starts)
    if not any(map(len, experts)):
        return table
    # int16 [T - 1, layers, k] of each episode, in bytes of little-endian rows
    [shape] = {array.shape[1:] for array in experts if len(array)}
    field = pa.field(EXPERTS, pa.binary(), metadata={"layers, k": json.dumps(shape)})
    column = pa.array([array.astype("<i2").tobytes() for array in experts], pa.binary())
    return table.append_column(field, column)


def _row(step: int, number: int, group: Group, episode: Episode) -> dict[str, Any]:
    """Return the columns of an episode but for its arrays."""
    problem = group.problem
    if episode.uid != problem.uid:
        raise ValueError(
            f"an episode of problem {episode.uid} stands in the group of problem {problem.uid}"
        )
    return {
        "step": step,
        "group": number,
        "outcome": group.outcome,
        "uid": problem.uid,
        "sample_index": episode.sample_index,
        "category": problem.category,
        "answer": problem.answer,
        "messages": json.dumps(list(problem.messages)),
        "metadata": json.dumps(problem.metadata, default=str),
        "opening": json.dumps(list(episode.opening)),
        "tools": json.dumps(list(episode.tools)),
        "transcript": json.dumps(list(episode.messages)),
        **{name: getattr(episode, name) for name in (*_SCALARS, *_DERIVED)},
        **{name: list(getattr(episode, name).items()) for name in MAPS},
    }


def _lists(arrays: Sequence[Array], kind: type[np.generic]) -> pa.ListArray:
    """Make a list column from arrays of the column's own dtype; refuse another dtype, as a cast
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


def json_lines(path: Path) -> Iterator[bytes]:
    """Yield each episode of a file as a line of JSONL with the same columns; chats, metadata and
    maps are objects, not text. Raises UserError for a damaged file.

    A float32 is written as the double of its value, and a value without a JSON number (NaN,
    infinities) as null.
    """
    for row in read_table(path).to_pylist():
        logprobs = [value if math.isfinite(value) else None for value in row["engine_logprobs"]]
        plain = {
            **row,
            **{name: json.loads(row[name]) for name in JSON},
            **{name: dict(row[name]) for name in MAPS},
            "engine_logprobs": logprobs,
        }
        yield json.dumps(plain, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def read_table(path: Path, columns: Sequence[str] = (), *, with_experts: bool = False) -> pa.Table:
    """Read some columns of a file as a table, or all but the experts. Raises UserError for a
    damaged file."""
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        more = [STARTS.name] * (not columns) + [EXPERTS] * with_experts
        there = [name for name in more if name in file.schema_arrow.names]
        columns = [*(columns or SCHEMA.names), *there]
        return file.read(columns=list(columns), use_threads=False).select(columns)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        "the episodes of a step cannot be read",
        where=str(path),
        found=str(error).splitlines()[0],
        expected="the Parquet file as Tandem wrote it",
        next="restore it; or, without rollout.staleness, remove it if it is after the last "
        "checkpoint: its step is made again",
    )
