"""Every episode of a run as one table in memory: filtered, sorted, searched, exported.

    episodes/train_step_000012.parquet  --> one row an episode: what a list shows, what is searched
             eval_sampled_step_*.parquet     newest files first, so a page comes before the last one
             eval_greedy_step_*.parquet

A file is read once, and again when it changes. The texts stay in memory: their size is what a run
costs here. It does not know one episode's tokens: that is episode.py.
"""

import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tandem.plugins.view.runs import Stamp, file_stamps
from tandem.run_folder.episode_files import SCHEMA, episode_file, json_lines, read_table
from tandem.runtime.errors import UserError
from tandem.runtime.image_parts import message_text

KINDS = ("train", "eval_sampled", "eval_greedy")
SNIPPET = 240  # characters of a text in a list
SLICE_S = 0.3  # of reading files before a request is answered with what there is
# the name here -> of the same values in the file
_PLAIN = {"step": "step", "group": "group", "sample": "sample_index"}
_PLAIN |= {"masked": "masked", "reward": "reward", "turns": "num_turns"}
_REPEATED = {"outcome": "outcome", "uid": "uid", "category": "category"}
_REPEATED |= {"answer": "answer", "stop": "stop_reason"}
_OTHERS = ("messages", "text", "loss_mask", "env_error", "reward_error")
SORTS = ("step", "reward", "tokens", "turns")
FACETS = ("kind", "outcome", "stop", "category")
SEARCHED = ("text", "prompt", "uid")
SHOWN = [
    *("kind", "step", "row", "group", "outcome", "uid", "sample", "category", "answer"),
    *("prompt", "text", "reward", "stop", "turns", "tokens", "error", "masked"),
]


def find(table: pa.Table, query: Mapping[str, str]) -> np.ndarray:
    """Return the places of the episodes that the parameters of an address mean, in their order.

    q: in the completion, the prompt or the uid, in any case; kind, outcome, stop, category, uid: as
    they are; step_from, step_to, reward_from, reward_to; errors: 1 for those with one; sort: one of
    SORTS, with a minus the largest first. Raises ValueError.
    """
    mask = np.ones(len(table), bool)
    for name in (*FACETS, "uid"):
        if query.get(name):
            mask &= _bools(pc.equal(_texts(table, name), query[name]))
    for name in ("step", "reward"):
        column = table.column(name).to_numpy()
        if low := query.get(f"{name}_from"):
            mask &= column >= float(low)
        if high := query.get(f"{name}_to"):
            mask &= column <= float(high)
    if query.get("errors") == "1":
        mask &= _bools(pc.not_equal(table.column("error"), ""))
    if query.get("q"):
        texts = (_texts(table, name) for name in SEARCHED)
        found = [_bools(pc.match_substring(one, query["q"], ignore_case=True)) for one in texts]
        mask &= np.logical_or.reduce(found)
    sort = query.get("sort") or "-step"
    if (name := sort.removeprefix("-")) not in SORTS:
        raise ValueError(f"sort is {sort!r}; expected one of {', '.join(SORTS)}, or with a minus")
    places, sign = np.flatnonzero(mask), -1 if sort.startswith("-") else 1
    columns = {n: table.column(n).to_numpy()[places] for n in ("row", "step", name)}
    kinds = pc.index_in(_texts(table, "kind"), pa.array(KINDS)).to_numpy()[places]
    # the last one counts most
    order = np.lexsort([columns["row"], kinds, sign * columns["step"], sign * columns[name]])
    return places[order]


def _texts(table: pa.Table, name: str) -> pa.ChunkedArray:
    return table.column(name).cast(pa.string())


def _bools(values: Any) -> np.ndarray:
    return np.asarray(values.to_numpy(zero_copy_only=False), bool)


class EpisodeTable:
    """The episodes of a run folder. Any thread may ask it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._read = dict[str, list[Stamp]]()  # by file name
        self._parts, self._damaged = [_NONE], dict[str, str]()

    def refresh(self) -> bool:
        """Read new files for SLICE_S; tell whether all are read."""
        with self._lock:
            paths = [p for kind in KINDS for p in self.folder.glob(f"{kind}_step_*.parquet")]
            places = {path.name: place for path in paths if (place := _place(path.name))}
            there = {name: file_stamps(self.folder / name) for name in places}
            if any(there.get(name) != stamp for name, stamp in self._read.items()):
                self._forget()  # a resume has removed or replaced some
            until = time.monotonic() + SLICE_S
            for name in sorted(
                there.keys() - self._read.keys(), key=lambda n: (-places[n][1], places[n][0])
            ):
                if time.monotonic() > until:
                    return False
                try:
                    self._parts.append(_index(self.folder / name))
                except (UserError, ValueError, TypeError, KeyError, AttributeError) as error:
                    self._damaged[name] = str(error).splitlines()[0]
                self._read[name] = there[name]
        return True

    def table(self) -> pa.Table:
        """Return all rows that are read, as they are now."""
        with self._lock:
            if len(self._parts) > 1:
                self._parts = [pa.concat_tables(self._parts).combine_chunks()]
            return self._parts[0]

    def page(self, query: Mapping[str, str], offset: int, limit: int) -> dict[str, Any]:
        """Return the rows of a page, the number of all that match and their mean reward."""
        complete, table = self.refresh(), self.table()
        places = find(table, query)
        rewards = table.column("reward").to_numpy()[places]
        facets = {name: pc.unique(_texts(table, name)).to_pylist() for name in FACETS}
        return {
            "count": len(places),
            "mean": float(np.nanmean(rewards)) if np.isfinite(rewards).any() else None,
            "rows": _rows(table.take(places[offset : offset + limit])),
            "complete": complete,
            "total": len(table),
            "facets": {name: sorted(filter(None, texts)) for name, texts in facets.items()},
            "damaged": dict(self._damaged),
        }

    def step(self, step: int) -> list[dict[str, Any]]:
        """List the episodes of a step, of its training and of its evaluation, by file and row.
        Raises UserError for a damaged file."""
        paths = [episode_file(self.folder, step, kind) for kind in KINDS]
        return [row for path in paths if path.is_file() for row in _rows(_index(path))]

    def versions(self, step: int) -> dict[int, int]:
        """Count the tokens that each version of the weights sampled for the training of a step."""
        path = episode_file(self.folder, step)
        if not path.is_file():
            return {}
        flat = pc.list_flatten(read_table(path, ["weight_versions"]).column("weight_versions"))
        counted = pc.value_counts(flat).to_pylist()
        return {one["values"]: one["counts"] for one in counted if one["values"] >= 0}

    def export_lines(self, query: Mapping[str, str]) -> Iterator[bytes]:
        """Return the episodes of a query as lines of JSONL, with all their columns."""
        found = self._selected(query)
        return (
            line for path, rows in found for n, line in enumerate(json_lines(path)) if n in rows
        )

    def export_parquet(self, query: Mapping[str, str], sink: Any) -> None:
        """Write the episodes of a query as one Parquet file, with the journal's columns."""
        found = self._selected(query)
        schema = pa.unify_schemas([SCHEMA, *(pq.read_schema(path) for path, _ in found)])
        with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
            for path, rows in found:
                some = read_table(path, with_experts=True).take(sorted(rows))
                parts = [schema.empty_table(), some]
                writer.write_table(pa.concat_tables(parts, promote_options="default"))

    def _selected(self, query: Mapping[str, str]) -> list[tuple[Path, set[int]]]:
        """Return the files of a query with the rows in each, in the order of the files."""
        while not self.refresh():
            pass
        table = self.table()
        found = defaultdict[tuple[int, str], set[int]](set)
        for row in table.select(["step", "kind", "row"]).take(find(table, query)).to_pylist():
            found[row["step"], row["kind"]].add(row["row"])
        return [
            (episode_file(self.folder, step, kind), rows)
            for (step, kind), rows in sorted(found.items())
        ]


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows as a list shows them, with the begin of each text."""
    rows: list[dict[str, Any]] = table.select(SHOWN).to_pylist()
    for row in rows:
        row["snippet"] = row.pop("text")[:SNIPPET]
    return rows


def _index(path: Path) -> pa.Table:
    """Read the rows of a file as the table has them."""
    table = read_table(path, [*_PLAIN.values(), *_REPEATED.values(), *_OTHERS])
    kind, _ = _place(path.name) or ("", 0)
    # the last message of each prompt, which attempts at a problem share
    chats = _repeated(table.column("messages"))
    prompts = [message_text(json.loads(text)[-1]) for text in chats.dictionary.to_pylist()]
    masks = table.column("loss_mask").combine_chunks()
    sums = np.concatenate([[0], np.cumsum(_bools(masks.values))])
    offsets = masks.offsets.to_numpy()
    columns = {
        **{name: table.column(there).combine_chunks() for name, there in _PLAIN.items()},
        **{name: _repeated(table.column(there)) for name, there in _REPEATED.items()},
        "kind": _repeated(pa.chunked_array([[kind] * len(table)], pa.string())),
        "row": pa.array(np.arange(len(table))),
        "prompt": pa.DictionaryArray.from_arrays(chats.indices, pa.array(prompts, pa.string())),
        "text": table.column("text").combine_chunks(),
        "tokens": pa.array(np.asarray(sums[offsets[1:]] - sums[offsets[:-1]], np.int64)),
        "error": pc.if_else(
            pc.equal(table.column("env_error"), ""),
            table.column("reward_error"),
            table.column("env_error"),
        ).combine_chunks(),
    }
    return pa.table({f.name: columns[f.name] for f in _SCHEMA}, schema=_SCHEMA)


def _repeated(column: pa.ChunkedArray) -> pa.DictionaryArray:
    return column.combine_chunks().dictionary_encode()


def _place(name: str) -> tuple[str, int] | None:
    """Read (kind, step) of the name of a file; None for another file."""
    match = re.fullmatch(rf"({'|'.join(KINDS)})_step_(\d+)\.parquet", name)
    return (match[1], int(match[2])) if match else None


_WORDS = pa.dictionary(pa.int32(), pa.string())
_SCHEMA = pa.schema(
    [
        *((n, SCHEMA.field(there).type) for n, there in _PLAIN.items()),
        *((n, _WORDS) for n in (*_REPEATED, "kind", "prompt")),
        *((n, pa.int64()) for n in ("row", "tokens")),
        *((n, pa.string()) for n in ("text", "error")),
    ]
)
_NONE = _SCHEMA.empty_table()
