"""Rollout workers that keep a trainer busy, by what a run has measured (timings.jsonl).

    workers = ceil(generated tokens a step / (trainer seconds a step * tokens/s of a worker))

Medians over steps; the first two are left out, as processes start in them. It knows neither
stragglers nor how much faster fewer requests a worker are.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tandem.run_folder.metrics import Metrics, read_metrics
from tandem.run_folder.read import open_past

SKIPPED = 2  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Measured medians of a step, and of one rollout worker."""

    steps: int  # measured
    tokens: float  # generated in a step
    trainer_s: float  # of a step: updates and publication
    worker_tokens_per_s: float

    @property
    def workers(self) -> int:
        """Workers that generate a step's tokens while the trainer makes a step."""
        return math.ceil(self.tokens / (self.trainer_s * self.worker_tokens_per_s))


def measured(folder: Path) -> Throughput | None:
    """Read what a run folder has measured; None if it has no run, or too few steps."""
    if not (folder / "config.toml").exists():
        return None
    workers = max(1, open_past(folder).config.rollout.workers)  # without: the trainer's own engine
    rows = [row for row in read_metrics(folder, "timings.jsonl") if row.get("rollout_s")]
    rows = rows[SKIPPED:]
    if not rows:
        return None
    tokens = [row["generated_tokens_per_s"] * row["rollout_s"] for row in rows]
    return Throughput(
        steps=len(rows),
        tokens=median(tokens),
        trainer_s=median(row["learn_s"] + row["sync_s"] for row in rows),
        worker_tokens_per_s=median(
            count / busy_s(row) / workers for count, row in zip(tokens, rows, strict=True)
        ),
    )


def busy_s(row: Metrics) -> float:
    """Return the seconds of the workers on a step, at most: those of its rollouts, or those between
    two steps where several are rolled out at once."""
    between = row["wait_s"] + row["learn_s"] + row["sync_s"] if "wait_s" in row else math.inf
    return min(row["rollout_s"], between)
