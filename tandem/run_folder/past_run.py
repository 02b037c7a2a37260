"""A run folder, read: its rows by step, the episodes of a step, its checkpoints, and what the
ledger says of each step.

    ledger.jsonl    {"step": 12, "weights": "<hash of the weights after it>", "episodes": "<SHA-256 of its journal file>",
                     "eval_greedy": "<of the file of its evaluation>", ..., "metrics": "<of its line in metrics.jsonl>"}

`altered` holds the folder against it. Reading changes nothing and works while the run goes on. It
does not know how a step is made: that is audit/replay.py.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tandem.config.recipe import load_config
from tandem.config.schema import Config
from tandem.run_folder.episode_files import episode_file, read_numbered
from tandem.run_folder.metrics import Metrics, read_lines, read_metrics
from tandem.runtime.disk import file_hash, read_plain
from tandem.runtime.errors import UserError
from tandem.types import Group, Problem

LEDGER = "ledger.jsonl"
KEPT_MODEL = "model"  # in a run folder: config and tokenizer of its model
_ABOUT = ["uid", "category", "answer", "messages", "metadata"]


@dataclass(frozen=True)
class PastRun:
    """A run folder that is only read."""

    folder: Path
    config: Config
    command: str  # the one that made it, e.g. "train"
    # where relative paths of the config begin; empty where that is not there any more
    directory: str

    @property
    def kept_model(self) -> str:
        """Directory with the model's config and tokenizer: the run's own copy, else (of an older
        run) model.path."""
        kept = self.folder / KEPT_MODEL
        return str(kept) if kept.is_dir() else self.config.model.path

    @cached_property
    def metrics(self) -> dict[int, Metrics]:
        """The rows of metrics.jsonl by step."""
        return {row["step"]: row for row in read_metrics(self.folder)}

    @cached_property
    def ledger(self) -> dict[int, Metrics]:
        """The rows of the ledger of steps whose metrics are told."""
        return {
            row["step"]: row
            for row in read_metrics(self.folder, LEDGER)
            if row["step"] in self.metrics
        }

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def episodes(self) -> Path:
        return self.folder / "episodes"

    def journal(self, step: int) -> Path:
        """The file of the episodes that step `step` had, counted from 1."""
        return episode_file(self.episodes, step)

    def journaled(self, kind: str = "train") -> list[int]:
        """The steps whose episodes are there, ascending; kind "eval_sampled" or "eval_greedy": of
        their evaluations."""
        return sorted(
            int(path.stem.rpartition("_")[2])
            for path in self.episodes.glob(f"{kind}_step_*.parquet")
        )

    def inputs(self) -> dict[str, str] | None:
        """SHA-256 by key of the data, reward functions and models that the run began with, as each
        checkpoint has them; None where none can be read."""
        for path in sorted(self.checkpoints.glob("step_*/state.json"), reverse=True):
            with suppress(UserError, KeyError):  # damaged, or pruned by the run just now
                found: dict[str, str] = _json(path)["data"]
                return found
        return None


def open_past(folder: Path) -> PastRun:
    """Raises UserError for what is not a run folder, or one whose config this version does not
    read."""
    if not (folder / "config.toml").is_file():
        raise UserError(
            "this is not a run folder",
            where=str(folder),
            found="no config.toml",
            expected="a folder made by a command that trains",
            next="ls runs/",
        )
    about = _about(folder)
    directory = str(about.get("directory", ""))  # runs of older versions have none
    config = load_config(folder / "config.toml", [])
    return PastRun(folder, config, about["command"], directory if os.path.isdir(directory) else "")


def _about(folder: Path) -> dict[str, Any]:
    """What run.json says; its "command" is text. Raises UserError."""
    about = _json(folder / "run.json")
    if not (isinstance(about, dict) and isinstance(about.get("command"), str)):
        raise UserError(
            "a file of the run folder cannot be read",
            where=str(folder / "run.json"),
            found=str(about)[:80],
            expected="the file as Tandem wrote it",
            next="restore it from a copy",
        )
    return about


@contextmanager
def entered(folder: Path) -> Iterator[PastRun]:
    """The run of a folder, with its directory as the working directory, so that the config's
    relative paths are the run's."""
    past = open_past(folder.absolute())
    with chdir(past.directory or "."):
        yield past


@dataclass(frozen=True, kw_only=True)
class Altered:
    """A file or a row of a run folder that is not as the run wrote it, by the ledger's hash."""

    step: int
    what: str  # "episodes/train_step_000002.parquet", "the row of step 2 in metrics.jsonl"
    recorded: str  # SHA-256
    found: str  # empty: it is not there

    def __str__(self) -> str:
        return f"{self.what}: {f'SHA-256 is {self.found[:16]}' if self.found else 'it is not there'}, was {self.recorded[:16]}"


def altered(folder: Path, up_to: int) -> list[Altered]:
    """Hash the files and rows of all steps up to `up_to` and return those whose hash is not the
    ledger's. Steps before the ledger's first row are not checked."""
    lines, rows = read_lines(folder), {row["step"]: row for row in read_metrics(folder, LEDGER)}
    pairs: list[tuple[int, str, str, str]] = []
    for step in range(min(rows, default=up_to + 1), up_to + 1):
        if step not in rows:
            pairs += [(step, f"the row of step {step} in {LEDGER}", "a row", "")] * (step in lines)
            continue
        for kind, recorded in rows[step].items():
            if kind == "metrics":
                pairs.append(
                    (
                        step,
                        f"the row of step {step} in metrics.jsonl",
                        recorded,
                        _line_hash(lines, step),
                    )
                )
            elif kind not in ("step", "weights") and recorded:
                path = episode_file(
                    folder / "episodes", step, "train" if kind == "episodes" else kind
                )
                pairs.append(
                    (
                        step,
                        f"episodes/{path.name}",
                        recorded,
                        file_hash(path) if path.is_file() else "",
                    )
                )
    return [
        Altered(step=s, what=what, recorded=was, found=now)
        for s, what, was, now in pairs
        if was != now
    ]


def _line_hash(lines: dict[int, bytes], step: int) -> str:
    """SHA-256 of a step's line; empty where there is none."""
    return hashlib.sha256(lines[step]).hexdigest() if step in lines else ""


def require_step(past: PastRun, step: int) -> None:
    """Raises UserError for a step that the run has not told."""
    last = max(past.metrics, default=0)
    if not 1 <= step <= last or step not in past.metrics:
        raise UserError(
            "the run has no such step",
            where=str(past.folder / "metrics.jsonl"),
            found=f"step {step}",
            expected=f"1 to {last}" if last else "a step, but the run has not ended one yet",
            next="name one that is there, or run longer",
        )


def read_step(path: Path) -> list[Group]:
    """Every group of a journal file, in its order. Raises UserError for a damaged or absent one.

    The problems are as the journal has them: what JSON has no word for is text in their metadata.
    """
    if not path.is_file():
        raise UserError(
            "the episodes of a step are not there",
            where=str(path),
            found="no such file",
            expected="the journal file as Tandem wrote it",
            next="restore the folder from a copy",
        )
    rows = zip(read_columns(path, _ABOUT), read_numbered(path), strict=True)
    members = [list(group) for _, group in groupby(rows, key=lambda row: row[1][0])]
    return [
        Group(
            problem=_problem(group[0][0]),
            episodes=tuple(e for _, (_, _, e) in group),
            outcome=group[0][1][1],
        )
        for group in members
    ]


def holds(path: Path, column: str, value: str | int) -> bool:
    """Whether some episode of a journal file has this uid, or this key. Raises UserError for a
    damaged file."""
    return any(row[column] == value for row in read_columns(path, [column]))


def read_columns(path: Path, columns: list[str]) -> list[dict[str, Any]]:
    """Some columns of each episode of a journal file, in its order. Raises UserError for a damaged
    file."""
    try:
        return list(pq.read_table(path, columns=columns, use_threads=False).to_pylist())
    except (OSError, KeyError, pa.ArrowException) as error:
        raise UserError(
            "the episodes of a step cannot be read",
            where=str(path),
            found=str(error).splitlines()[0],
            expected="the Parquet file as Tandem wrote it",
            next="restore it from a copy",
        ) from error


def _problem(row: dict[str, Any]) -> Problem:
    return Problem(
        uid=row["uid"],
        messages=tuple(json.loads(row["messages"])),
        answer=row["answer"],
        category=row["category"],
        metadata=json.loads(row["metadata"]),
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            "a file of the run folder cannot be read",
            where=str(path),
            found=f"{type(error).__name__}: {error}",
            expected="the file as Tandem wrote it",
            next="restore it from a copy",
        ) from error
