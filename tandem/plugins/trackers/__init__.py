"""Trackers of runs: Weights & Biases, Trackio, MLflow.

For anyone who compares runs in one of these services; docs/guide/trackers.md has the variables that
each of them reads. A tracker is one file over its own package, and its extra has its name: `wandb`,
`trackio`, `mlflow`.

It plugs in as trackers of tandem/registry.py. The Protocol is that of run_folder/tracking.py, which
runs each in a thread of its own: a run neither waits for it nor fails with it.
"""
