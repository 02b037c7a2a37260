"""Trackio. Its own variables say where: TRACKIO_PROJECT (tandem), TRACKIO_DIR, TRACKIO_SPACE_ID."""

import os

import trackio

from tandem.run_folder.tracking import COLUMNS, SampleRow, TrackedRun


class TrackioTracker:
    """A run of Trackio, which knows a run by its name alone."""

    def __init__(self, run: TrackedRun):
        trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "tandem"),
            name=f"{run.name}-{run.id[:8]}",
            config=run.config,
            resume="allow",
            embed=False,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        trackio.log(metrics, step=step)

    def log_samples(self, step: int, rows: list[SampleRow]) -> None:
        table = [[row[c] for c in COLUMNS] for row in rows]
        trackio.log({"samples": trackio.Table(columns=list(COLUMNS), data=table)}, step=step)

    def close(self) -> None:
        trackio.finish()
