"""The best evaluation of a run, by its held-out reward, and early stopping.

    best.json   {"step": 20, "reward": 0.61, "misses": 1}

It is a function of the rows of metrics.jsonl alone, so a resumed run keeps and stops as one that
was never stopped. It does not know what a checkpoint holds.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tandem.run_folder.files import RESTORE_OR_FRESH, read_file
from tandem.run_folder.metrics import Metrics
from tandem.runtime.disk import write_atomic
from tandem.runtime.errors import UserError

BEST = "best.json"
REWARDS = ("eval/sampled", "eval/greedy")  # the first that a row has


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best evaluation so far. Example: Best(step=20, reward=0.61, misses=1)"""

    step: int  # 0: the starting model
    reward: float
    misses: int  # evaluations since then

    def __str__(self) -> str:
        what = f"step {self.step}" if self.step else "the starting model"
        return f"{what}, held-out reward {self.reward:.3f}"


class BestTracker:
    """The best evaluation while a run goes on, in best.json.

    keep: its checkpoint is kept; patience: evaluations without a better one that end the run, 0:
    none do.
    """

    def __init__(self, folder: Path, keep: bool, patience: int):
        self.folder, self.keep, self.patience = folder, keep, patience
        self.best: Best | None = None

    def update(self, rows: Iterable[Metrics]) -> bool:
        """Take up the rows that follow; return whether one of them is the best so far. Of equal
        rewards the first is the best, and one that is not finite is none."""
        before = self.best
        for row in rows:
            rewards = [row[name] for name in REWARDS if name in row]
            if not rewards:
                continue
            reward, best = rewards[0], self.best
            finite = reward is not None and math.isfinite(reward)
            if finite and (best is None or reward > best.reward):
                self.best = Best(step=row["step"], reward=reward, misses=0)
            elif best is not None:
                self.best = replace(best, misses=best.misses + 1)
        if self.best is not None and self.best != before:
            write_best(self.folder, self.best)
        return self.best is not None and (before is None or self.best.step > before.step)

    @property
    def out_of_patience(self) -> bool:
        return bool(self.patience and self.best and self.best.misses >= self.patience)

    @property
    def kept_step(self) -> int | None:
        """The step whose checkpoint is kept."""
        return self.best.step if self.keep and self.best is not None else None


def write_best(folder: Path, best: Best) -> None:
    """Replace best.json of a run folder."""
    write_atomic(folder / BEST, json.dumps(asdict(best)).encode() + b"\n")


def read_best(folder: Path) -> Best:
    """Read best.json of a run folder. Raises UserError if the run has none."""
    path = folder / BEST
    if not path.exists():
        raise UserError(
            "the run has kept no best checkpoint",
            where=str(folder),
            found=f"no {BEST}",
            expected="a run with eval.keep_best=true that has evaluated",
            next="name a checkpoint with --step",
        )
    return read_file(path, lambda text: Best(**json.loads(text)), next=RESTORE_OR_FRESH)
