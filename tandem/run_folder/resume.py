"""Checks before a run goes on from its newest whole checkpoint: data, ledger and files must still
be those of the run. It does not know what a checkpoint holds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.config.schema import Config
from tandem.run_folder.checkpoint import checkpoint_step, latest_checkpoint, load_checkpoint
from tandem.run_folder.metrics import read_metrics
from tandem.run_folder.past_run import altered
from tandem.run_folder.shards import SavedTensors
from tandem.runtime.errors import UserError

Report = Callable[[str], None]


def resumable(
    folder: Path, config: Config, data: dict[str, str], report: Report
) -> tuple[Path, dict[str, SavedTensors], dict[str, Any]] | None:
    """Find the checkpoint to go on from, None if the run has none yet; check that data, ledger and
    files are still those of the run. Raises UserError."""
    path = latest_checkpoint(folder / "checkpoints", report)
    if path is None:
        _require_no_progress(folder, config)
        return None
    tensors, state = load_checkpoint(path, verify=False)  # latest_checkpoint has just verified it
    if "pending_metrics" not in state:
        raise _of_another_version(path)
    if changed := [k for k in {**state["data"], **data} if state["data"].get(k) != data.get(k)]:
        raise _other_data(changed)
    logged = checkpoint_step(path) - (json.loads(state["pending_metrics"]) is not None)
    _check_past(folder, logged, report)
    return path, tensors, state


def _require_no_progress(folder: Path, config: Config) -> None:
    """Raise UserError if metrics prove that a checkpoint existed: a save waits for the one before,
    so a run that has gone on from its second one has had a checkpoint."""
    rows, every = read_metrics(folder), config.run.save_every
    if rows and rows[-1]["step"] > 2 * every:
        raise _no_checkpoints(folder, int(rows[-1]["step"]), every)


def _check_past(folder: Path, done: int, report: Report) -> None:
    """Raise UserError if a file of the steps up to `done` is not as the ledger has it. Missing
    episodes are only reported: none but the last step's are needed."""
    changed = altered(folder, done)
    gone = [one.what for one in changed if not one.found and one.what.startswith("episodes/")]
    if gone:
        names = ", ".join(gone[:3]) + " ..." * (len(gone) > 3)
        report(f"no longer there, of steps before the checkpoint: {names}")
    if wrong := [one for one in changed if one.what not in gone]:
        raise UserError(
            "what the run has kept of its steps is not as it was written",
            where=str(folder),
            found="; ".join(map(str, wrong[:3])),
            expected="the bytes that ledger.jsonl has the hashes of",
            next="restore it from a copy, or start over with --fresh "
            "(the old run is kept beside it)",
        )


def _no_checkpoints(folder: Path, last: int, every: int) -> UserError:
    return UserError(
        "the checkpoints of the run are gone",
        where=str(folder / "checkpoints"),
        found="none",
        expected=f"some: metrics.jsonl ends at step {last}, with run.save_every = {every}",
        next="restore them, or set back a run.save_every that was lowered before the first save, "
        "or start over with --fresh (the old run is kept beside it)",
    )


def _of_another_version(checkpoint: Path) -> UserError:
    return UserError(
        "the run was begun by an earlier version of Tandem",
        where=str(checkpoint),
        expected="a checkpoint of this version",
        next="finish it with that version, or start over with --fresh "
        "(the old run is kept beside it)",
    )


def _other_data(changed: list[str]) -> UserError:
    return UserError(
        "a data file, a function of yours or the starting model has changed since the run began",
        where=", ".join(changed),
        expected="the same bytes: the rest of the run would not be the same run",
        next="restore it, take another run.folder=PATH, or start over with --fresh "
        "(the old run is kept beside it)",
    )
