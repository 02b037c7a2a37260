"""A run folder, read: its rows by step, the episodes of a step, its checkpoints, the ledger's row
of each step, and what log.txt notes.

    ledger.jsonl    {"step": 12, "weights": "<hash of the weights after it>",
                     "episodes": "<SHA-256 of its journal file>",
                     "eval_greedy": "<of the file of its evaluation>", ...,
                     "metrics": "<of its line in metrics.jsonl>"}
    log.txt         2026-01-31T12:00:00Z resumed by pid 4711: tandem train
                    2026-01-31T12:03:10Z warning at step 12: the reward is falling, 0.61 -> 0.38
                    2026-01-31T12:04:02Z failed: the engine cannot be reached

`altered` compares the folder with it. Reading changes nothing and works while the run goes on. It
does not know how a step is made: that is plugins/audit/replay_run.py.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tandem.config.recipe import load_config
from tandem.config.schema import Config
from tandem.model import custom_code
from tandem.run_folder.episode_files import episode_file
from tandem.run_folder.files import FAILED, KEPT_MODEL, LEDGER, read_about, read_file, require_run
from tandem.run_folder.metrics import Metrics, read_metrics, read_rows
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import UserError
from tandem.runtime.image_parts import keep_in

MOST_WARNINGS = 50
TAIL = 1 << 20  # bytes of a log that are read
_START = re.compile(r"(started|resumed) by pid \d+: ")
_WARNING = re.compile(r"warning[ :]")


@dataclass(frozen=True)
class PastRun:
    """A run folder that is only read."""

    folder: Path
    config: Config
    command: str  # the one that made it, e.g. "train"
    # where relative paths of the config begin; empty if that no longer exists
    directory: str

    @property
    def kept_model(self) -> str:
        """The directory with the run's copy of its model's config and tokenizer."""
        return str(self.folder / KEPT_MODEL)

    @cached_property
    def metrics(self) -> dict[int, Metrics]:
        """The rows of metrics.jsonl by step."""
        return {row["step"]: row for row in read_metrics(self.folder)}

    @cached_property
    def ledger(self) -> dict[int, Metrics]:
        """The rows of the ledger, of steps that have a row of metrics."""
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
        """Return the path of the episodes of step `step`, counted from 1."""
        return episode_file(self.episodes, step)

    def journaled(self, kind: str = "train") -> list[int]:
        """List the steps whose episodes are there, ascending; kind "eval_sampled" or "eval_greedy":
        of their evaluations."""
        return sorted(
            int(path.stem.rpartition("_")[2])
            for path in self.episodes.glob(f"{kind}_step_*.parquet")
        )

    def inputs(self) -> dict[str, str] | None:
        """Read the SHA-256 by key of the data, reward functions and models that the run began with,
        from the newest readable checkpoint; None without one."""
        for path in sorted(self.checkpoints.glob("step_*/state.json"), reverse=True):
            with suppress(UserError):  # damaged, or pruned by the run just now
                inputs: dict[str, str] = read_file(path, lambda text: json.loads(text)["data"])
                return inputs
        return None


def open_past(folder: Path) -> PastRun:
    """Read the config and the command of a run folder. Raises UserError for another folder, or a
    config that this version does not read."""
    require_run(folder)
    about = read_about(folder)
    directory = about["directory"] if os.path.isdir(about["directory"]) else ""
    return PastRun(folder, load_config(folder / "config.toml", []), about["command"], directory)


@contextmanager
def entered(folder: Path) -> Iterator[PastRun]:
    """Open the run of a folder, with its directory as the working directory, for the config's
    relative paths."""
    past = open_past(folder.absolute())
    custom_code.allow(past.config.model.trust_remote_code)
    keep_in(past.folder / "images")
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
        now = f"SHA-256 is {self.found[:16]}" if self.found else "it is not there"
        return f"{self.what}: {now}, was {self.recorded[:16]}"


def altered(folder: Path, up_to: float = math.inf) -> list[Altered]:
    """Hash the files and rows of all steps up to `up_to` and return those whose hash is not the
    ledger's."""
    lines = {row["step"]: line for line, row in read_rows(folder / "metrics.jsonl")}
    rows = {row["step"]: row for row in read_metrics(folder, LEDGER)}
    checked: list[Altered] = []
    for step in sorted({*lines, *rows}):
        if step > up_to:
            continue
        what, recorded, found = f"the row of step {step} in {LEDGER}", "a row", ""
        if step not in rows:
            checked.append(Altered(step=step, what=what, recorded=recorded, found=found))
        for kind, recorded in rows.get(step, {}).items():
            if kind in ("step", "weights"):
                continue
            if kind == "metrics":
                what = f"the row of step {step} in metrics.jsonl"
                found = hashlib.sha256(lines[step]).hexdigest() if step in lines else ""
            else:
                file_kind = "train" if kind == "episodes" else kind
                path = episode_file(folder / "episodes", step, file_kind)
                what = f"episodes/{path.name}"
                found = file_hash(path) if path.is_file() else ""
            checked.append(Altered(step=step, what=what, recorded=recorded, found=found))
    return [one for one in checked if one.recorded != one.found]


def require_step(past: PastRun, step: int) -> None:
    """Raise UserError for a step that the run has not ended."""
    last = max(past.metrics, default=0)
    if not 1 <= step <= last or step not in past.metrics:
        raise UserError(
            "the run has no such step",
            where=str(past.folder / "metrics.jsonl"),
            found=f"step {step}",
            expected=f"1 to {last}" if last else "a step, but the run has not ended one yet",
            next="name one that is there, or run longer",
        )


def without_evaluation(row: Metrics) -> Metrics:
    """Take the metrics of the step itself from a row: neither its number nor its evaluation."""
    return {k: value for k, value in row.items() if k != "step" and not k.startswith("eval/")}


# ---- log.txt


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """Notes of a log. warnings: of all starts, each once, the newest last."""

    failed: str = ""  # the reason, of the last start
    warnings: tuple[str, ...] = ()


def read_notes(folder: Path) -> Notes:
    """Read the end of log.txt; empty notes if there is none."""
    try:
        with (folder / "log.txt").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return Notes()
    failed, warnings = "", dict[str, None]()
    for line in lines:
        text = line.partition(" ")[2]
        if text.startswith(FAILED):
            failed = text.removeprefix(FAILED)
        elif _START.match(text):
            failed = ""
        elif _WARNING.match(text):
            warnings.pop(text, None)
            warnings[text] = None
    return Notes(failed=failed, warnings=tuple(warnings)[-MOST_WARNINGS:])
