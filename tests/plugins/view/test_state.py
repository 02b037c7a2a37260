"""The state of a run in the list: by its lock, the process that holds it and its files."""

import json
import os
import socket
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from tandem.plugins.view.report import report
from tandem.plugins.view.runs import Run
from tests.support.viewing import add_step, make_run

HERE = socket.gethostname()


def state(run, holder, *, done=1, steps=5, age_s=0.0):
    """The state of a run whose files were written so long ago."""
    (run / "lock").write_text(f"{holder}\n" if holder else "")
    written = datetime.now(UTC).timestamp() - age_s
    for path in run.iterdir():
        os.utime(path, (written, written))
    return Run(run, "run").state(done, steps)


@pytest.fixture
def run(tmp_path):
    run = make_run(tmp_path / "run")
    add_step(run, 1, reward=0.5)
    return run


def since(**ago):
    return (datetime.now(UTC) - timedelta(**ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_a_run_of_another_machine_runs_while_its_files_are_fresh(run):
    holder = f"pid 1 on another-{HERE} since {since(hours=3)}"
    assert state(run, holder, age_s=60) == "running"
    assert state(run, holder, age_s=3600) == "unknown"
    assert state(run, holder, done=5, age_s=3600) == "finished"
    assert state(run, "what is this", age_s=3600) == "unknown"


def test_a_process_is_the_run_only_if_it_is_as_old_as_the_lock(run):
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            holder = f"pid {process.pid} on {HERE} since"
            assert state(run, f"{holder} {since()}", age_s=3600) == "running"
            assert state(run, f"{holder} {since(hours=3)}", age_s=3600) == "killed"
        finally:
            process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and its parent slow
        assert state(run, f"{holder} {since()}") == "killed"
    assert state(run, f"{holder} {since()}") == "killed"
    assert state(run, "") == "stopped"
    assert state(run, "", done=None) == "not begun"


def test_a_run_that_an_error_ended_has_its_reason_until_the_next_start(run):
    log = run / "log.txt"
    log.write_text("T started by pid 1: tandem train\nT failed: the disk is full\n")
    (run / "lock").write_text("")
    one = Run(run, "run")
    assert (one.summary()["state"], one.summary()["failed"]) == ("failed", "the disk is full")
    assert "the disk is full" in report(one)
    log.write_text(log.read_text() + "T resumed by pid 2: tandem train\nT warning at step 2: x\n")
    summary = one.summary()
    assert (summary["state"], summary["failed"]) == ("stopped", "")
    assert summary["warnings"] == ["warning at step 2: x"]
    assert "warning at step 2: x" in report(one)
    assert one.state(5, 5) == "finished"


def test_the_best_evaluation_is_in_the_list(run):
    assert Run(run, "run").summary()["best"] == {}
    (run / "best.json").write_text(json.dumps({"step": 20, "reward": 0.61, "misses": 1}))
    assert Run(run, "run").summary()["best"]["step"] == 20
    (run / "best.json").write_text('{"step": "x", "reward": 1}')
    assert Run(run, "run").summary()["best"] == {}
