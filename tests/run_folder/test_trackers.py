"""Trackers get the rows and samples of a run, go on after a resume, and cannot stop it; the real
packages where they are installed."""

import json
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import chdir, suppress
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest

from tandem.config.schema import Config
from tandem.run_folder.samples import Sample
from tandem.run_folder.tracking import QUEUED, Trackers
from tests.support.odd_tracker import OddTracker
from tests.support.viewing import group

TOLD = group("p/1", ["\x1b[2Jtwo"], [0.5], prompt="1+1?")
SAMPLE = Sample(step=1, row=0, place=0, group=TOLD)
READ_WANDB = Path(__file__).parents[1] / "support/read_wandb.py"
ROW = {"reward": 0.25, "eval/pass@4": 0.5, "none": None, "nan": float("nan"), "deep": {"a": 1}}


def installed(name):
    """A mark that skips without the package; a folder of that name is none."""
    spec = find_spec(name)
    missing = spec is None or spec.origin is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"{name} is not installed"))


def tracked(folder, names=(), odd=None, steps=(1, 2), **times):
    """Log some steps as a run does; return its warnings and the seconds that the end took."""
    warnings = []
    config = Config.model_validate({"run": {"trackers": list(names), "seed": 3}})
    folder.mkdir(exist_ok=True)
    with Trackers(config, folder, warnings.append, **times) as trackers:
        if odd:
            trackers.add("odd", odd)
        for step in steps:
            trackers.log(step, ROW | {"reward": step / 4}, {"step_s": 0.5})
            trackers.log_samples(step, [SAMPLE])
        start = time.perf_counter()
    return warnings, time.perf_counter() - start


def in_a_new_process(folder, name, steps=(1, 2)):
    """Log with a real package, which keeps settings of its first run, and leaves folders in
    TMPDIR."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        assert process.submit(tracked, folder, [name], steps=steps).result()[0] == []


def twice(folder, name, **variables):
    """Run two steps, and go on from the first of them."""
    (folder.parent / "tmp").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in {"TMPDIR": folder.parent / "tmp", **variables}.items():
            patch.setenv(variable, str(value))
        in_a_new_process(folder, name, (1, 2))
        in_a_new_process(folder, name, (2, 3))


def odd(file, kind):
    return lambda run: OddTracker(run, file, kind)


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_tracker_gets_the_config_every_row_and_the_samples_in_order(tmp_path):
    assert tracked(tmp_path / "run", odd=odd(tmp_path / "got", "plain"))[0] == []
    opened, first, samples, second, _, closed = lines(tmp_path / "got")
    assert opened[0] == "open" and opened[2:] == ["run", 3] and closed == ["close"]
    assert first[2].pop("nan") != first[2]
    row = {"reward": 0.25, "eval/pass@4": 0.5, "deep/a": 1.0, "timings/step_s": 0.5}
    assert first == ["log", 1, row] and second[2]["reward"] == 0.5
    told = {"prompt": "user: 1+1?", "completion": "\\x1b[2Jtwo"}
    assert samples[2] == [{"step": 1, "sample": "1:p/1:0", "reward": 0.5, **told}]


def test_resumed_run_opens_the_same_run_of_the_tracker(tmp_path):
    for file in ("first", "again"):
        tracked(tmp_path / "run", odd=odd(tmp_path / file, "plain"))
    tracked(tmp_path / "other", odd=odd(tmp_path / "other.txt", "plain"))
    first, again, other = (lines(tmp_path / n)[0][1] for n in ("first", "again", "other.txt"))
    assert first == again != other


@pytest.mark.parametrize(
    ("how", "said"),
    [("raise", "ConnectionError: no route at {}"), ("hang", "had not taken everything")],
)
@pytest.mark.parametrize("when", ["open", "log", "close"])
def test_tracker_that_fails_or_hangs_is_one_warning(how, said, when, tmp_path):
    tracker = odd(tmp_path / "got", f"{how}-{when}")
    warnings, seconds = tracked(tmp_path / "run", odd=tracker, steps=range(50), close_s=0.5)
    [warning], said = warnings, said.format(when)
    assert warning.startswith("warning: tracker odd is lost, the run goes on without it: ")
    assert said in warning and seconds < 5


def test_tracker_that_does_not_keep_up_is_one_warning(tmp_path):
    hanging = odd(tmp_path / "got", "hang-log")
    [warning] = tracked(tmp_path / "run", odd=hanging, steps=range(QUEUED), close_s=0.5)[0]
    assert "rows and tables wait for it" in warning


def test_interrupted_run_leaves_a_hanging_tracker_soon(tmp_path):
    start = time.perf_counter()
    with suppress(KeyboardInterrupt), Trackers(Config(), tmp_path, print) as trackers:
        trackers.add("odd", odd(tmp_path / "got", "hang-open"))
        raise KeyboardInterrupt
    assert time.perf_counter() - start < 8


# ---- the real packages, offline


@pytest.mark.parametrize("name", [installed("wandb")])
def test_wandb_has_the_run_offline(name, tmp_path):
    folder, place = tmp_path / "runs/demo/train", {"WANDB_MODE": "offline", "WANDB_DIR": tmp_path}
    folder.mkdir(parents=True)
    twice(folder, name, **place)
    paths = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    command = [sys.executable, str(READ_WANDB), *map(str, paths)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    runs, names, configs, rows = zip(*map(json.loads, printed.splitlines()), strict=True)
    assert len(runs) == 2 and len(set(runs)) == 1 and set(names) == {"demo/train"}
    assert [config["run"]["seed"] for config in configs] == [3, 3]
    found = {
        row["step"]: (row["reward"], row["timings/step_s"], row["eval/pass@4"])
        for row in (*rows[0], *rows[1])
        if "reward" in row
    }
    assert found == {step: (step / 4, 0.5, 0.5) for step in (1, 2, 3)}
    files = list(tmp_path.glob("wandb/offline-run-*/files/media/table/*.json"))
    assert len(files) == 4 and all("user: 1+1?" in file.read_text() for file in files)


@pytest.mark.parametrize("name", [installed("mlflow")])
def test_mlflow_has_the_run_in_a_local_database(name, tmp_path):
    import mlflow

    with chdir(tmp_path):  # its artifacts go to the working directory
        twice(tmp_path / "run", name, MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("tandem")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.data.params["run.seed"] == "3" and run.info.run_name == "run"
    history = client.get_metric_history(run.info.run_id, "reward")
    assert {one.step: one.value for one in history} == {1: 0.25, 2: 0.5, 3: 0.75}
    assert run.data.metrics["eval/pass_4"] == 0.5
    assert [one.path for one in client.list_artifacts(run.info.run_id)] == ["samples.json"]


@pytest.mark.parametrize("name", [installed("trackio")])
def test_trackio_has_the_run_in_a_local_folder(name, tmp_path):
    twice(tmp_path / "run", name, TRACKIO_DIR=tmp_path / "store")
    [database] = Path(tmp_path / "store").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics").fetchall()
    assert len({run for run, _, _ in rows}) == 1
    found = [(step, json.loads(text)) for _, step, text in rows]
    rewards = {step: row["reward"] for step, row in found if "reward" in row}
    assert rewards == {1: 0.25, 2: 0.5, 3: 0.75}
    assert sum("samples" in row for _, row in found) == 4
