"""Weights & Biases. Its own variables say where: WANDB_PROJECT (tandem), WANDB_ENTITY, WANDB_DIR,
WANDB_NAME (the run's path), WANDB_MODE=offline."""

import os

import wandb

from tandem.run_folder.tracking import COLUMNS, SampleRow, TrackedRun


class WandbTracker:
    """A run of Weights & Biases; its x axis is the step, also of rows that a resume logs again."""

    def __init__(self, run: TrackedRun):
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tandem"),
            id=run.id,
            name=os.environ.get("WANDB_NAME") or run.name,
            config=run.config,
            resume="allow",
            # the terminal is the run's, which does not wait for an upload without end
            settings=wandb.Settings(console="off", silent=True, finish_timeout=30),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_samples(self, step: int, rows: list[SampleRow]) -> None:
        table = wandb.Table(columns=list(COLUMNS), data=[[row[c] for c in COLUMNS] for row in rows])
        self._run.log({"step": step, "samples": table})

    def close(self) -> None:
        self._run.finish()
