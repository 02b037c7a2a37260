"""The disk that a run needs for its checkpoints and its export, before its first step."""

import shutil
from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch

from tandem.config.schema import Config
from tandem.runtime.disk import existing_parent, human_bytes
from tandem.runtime.errors import UserError
from tandem.train.learner import Learner

ADAPTER = ".lora_"  # in the name of its weights


def free_for(folder: Path) -> int:
    """Return the bytes that a run folder may still take, those of its old checkpoints included."""
    held = sum(file.stat().st_size for file in (folder / "checkpoints").glob("step_*/*"))
    return shutil.disk_usage(existing_parent(folder)).free + held


def require_disk(config: Config, learners: Iterable[Learner], folder: Path) -> None:
    """Raise UserError if checkpoints and export do not fit on the disk of the run folder."""
    first, *others = learners
    saved = sum(map(_checkpoint_bytes, (first, *others)))
    shapes = first.ranks.shapes(first.model).items()
    export = first.dtype.itemsize * sum(prod(s) for name, s in shapes if ADAPTER not in name)
    kept = config.run.keep_checkpoints + config.eval.keep_best  # while one more is written
    there, needed = free_for(folder), (kept + 1) * saved + export
    if needed > there:
        raise UserError(
            "the run would not fit on the disk",
            where=str(folder),
            found=f"{human_bytes(there)} free",
            expected=f"{human_bytes(needed)} for checkpoints and export",
            next="free some, or another run.folder; fewer run.keep_checkpoints need less",
        )


def _checkpoint_bytes(learner: Learner) -> int:
    """Count the trained weights in float32, and their moments."""
    optimizer, shapes = learner.optimizer, learner.ranks.shapes(learner.model)
    if learner.model.lora is not None:
        shapes = {name: shape for name, shape in shapes.items() if ADAPTER in name}
    saved = 0
    for name, shape in shapes.items():
        muon = optimizer.has_momentum(name, torch.empty(shape, device="meta"))
        saved += 4 * prod(shape) + (4 * prod(shape) if muon else optimizer.moment_bytes(shape))
    return saved
