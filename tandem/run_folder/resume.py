"""Checks before a run goes on from its newest whole checkpoint: data, ledger and files must still
be those of the run. It does not know what a checkpoint holds."""

import json
from pathlib import Path
from typing import Any

from tandem.choices import Report
from tandem.config.schema import Config
from tandem.model.load import ExactModel
from tandem.run_folder.checkpoint import checkpoint_step, latest_checkpoint, load_checkpoint
from tandem.run_folder.files import FRESH, LEDGER, RESTORE_OR_FRESH
from tandem.run_folder.metrics import read_metrics
from tandem.run_folder.shards import SavedTensors
from tandem.runtime.errors import UserError
from tandem.weights.hashing import weight_hash


def resumable(
    folder: Path, config: Config, data: dict[str, str], report: Report
) -> tuple[Path, dict[str, SavedTensors], dict[str, Any]] | None:
    """Find the checkpoint to go on from, None if the run has none yet; check that data, ledger and
    files are still those of the run. Raises UserError."""
    path = latest_checkpoint(folder / "checkpoints", report)
    if path is None:
        rows, every = read_metrics(folder), config.run.save_every
        # a save waits for the one before: a run that has gone on from its second one has had one
        if rows and rows[-1]["step"] > 2 * every:
            raise UserError(
                "the checkpoints of the run are gone",
                where=str(folder / "checkpoints"),
                found="none",
                expected=f"some: metrics.jsonl ends at step {rows[-1]['step']}, with "
                f"run.save_every = {every}",
                next="restore them, or set back a run.save_every that was lowered before the first "
                f"save, or {FRESH}",
            )
        return None
    tensors, state = load_checkpoint(path, verify=False)  # latest_checkpoint has just verified it
    require_same_inputs(state["data"], data)
    logged = checkpoint_step(path) - (json.loads(state["pending_metrics"]) is not None)
    _check_past(folder, logged, report)
    return path, tensors, state


def require_same_inputs(recorded: dict[str, str], now: dict[str, str]) -> None:
    """Raise UserError unless the inputs have the hashes that the run began with, by key."""
    if changed := [k for k in {**recorded, **now} if recorded.get(k) != now.get(k)]:
        raise UserError(
            "a data file, a function of yours or the starting model has changed since the run "
            "began",
            where=", ".join(changed),
            expected="the same bytes: the rest of the run would not be the same run",
            next=f"restore it, take another run.folder=PATH, or {FRESH}",
        )


def _check_past(folder: Path, done: int, report: Report) -> None:
    """Raise UserError if a row or a file is not as the ledger has it, of steps after `done` too:
    their rows are cut and made again, from their episodes. Missing episodes are no error, and only
    reported up to `done`; nor are metrics after it, which a kill leaves out."""
    from tandem.run_folder.read import altered

    changed = altered(folder)
    gone = [one for one in changed if not one.found and one.what.startswith("episodes/")]
    cut = [one for one in changed if not one.found and one.what.endswith("metrics.jsonl")]
    if names := [one.what for one in gone if one.step <= done]:
        more = " ..." * (len(names) > 3)
        report(f"no longer there, of steps before the checkpoint: {', '.join(names[:3])}{more}")
    fine = [*gone, *(one for one in cut if one.step > done)]
    if wrong := [str(one) for one in changed if one not in fine]:
        raise _not_as_written(folder, "; ".join(wrong[:3]))


def check_weights(folder: Path, step: int, model: ExactModel, report: Report) -> None:
    """Raise UserError if the ledger has another hash for the weights after a step than those of
    the model; report it if an adapter is merged into them, which each processor rounds its way."""
    recorded = [row.get("weights") for row in read_metrics(folder, LEDGER) if row["step"] == step]
    if not recorded or recorded == [found := weight_hash(model.merged())]:
        return
    what = f"the row of step {step} in {LEDGER} has weights {recorded[0]!s:.16}"
    error = _not_as_written(folder, f"{what}, the checkpoint {found:.16}")
    if not model.adapter_weights():
        raise error
    report(f"{error.what}: {error.found}")


def _not_as_written(folder: Path, found: str) -> UserError:
    return UserError(
        "what the run has kept of its steps is not as it was written",
        where=str(folder),
        found=found,
        expected=f"the bytes that {LEDGER} has the hashes of",
        next=RESTORE_OR_FRESH,
    )
