"""MLflow. Its own variables say where: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME (tandem)."""

import os
import re

import mlflow

from tandem.run_folder.tracking import COLUMNS, SampleRow, TrackedRun

_RUN = "tandem_run"  # the tag by which a resume finds its run


class MlflowTracker:
    """A run of MLflow. Parameters cannot change there, so they are those of the first start."""

    def __init__(self, run: TrackedRun):
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "tandem"))
        tag = f"tags.{_RUN} = '{run.id}'"
        if found := mlflow.search_runs(filter_string=tag, output_format="list"):
            mlflow.start_run(run_id=found[0].info.run_id)
            return
        mlflow.start_run(run_name=run.name, tags={_RUN: run.id})
        sections = run.config.items()
        mlflow.log_params({f"{s}.{key}": v for s, keys in sections for key, v in keys.items()})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        named = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in metrics.items()}
        mlflow.log_metrics(named, step=step)

    def log_samples(self, step: int, rows: list[SampleRow]) -> None:
        mlflow.log_table({c: [row[c] for row in rows] for c in COLUMNS}, "samples.json")

    def close(self) -> None:
        mlflow.end_run()
