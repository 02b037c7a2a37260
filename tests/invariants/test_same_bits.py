"""P2: a killed run, started again by the same command, ends with the same bytes as one that was never stopped."""

import numpy as np
import pytest

from tests.invariants.kills import fingerprint, interrupted, prepare, run


@pytest.fixture(scope="module", params=["train", "sft"])
def undisturbed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    command = prepare(folder, command=request.param)
    _, seconds = run(command, folder / "run")
    return command, fingerprint(folder / "run"), seconds


def test_two_runs_with_one_seed_are_the_same_bytes(undisturbed, tmp_path):
    command, expected, _ = undisturbed
    run(command, tmp_path / "again")
    assert fingerprint(tmp_path / "again") == expected


def test_another_seed_gives_other_bytes(undisturbed, tmp_path):
    command, expected, _ = undisturbed
    run([*command, "run.seed=1"], tmp_path / "other")
    other = fingerprint(tmp_path / "other")
    assert other.keys() == expected.keys()
    assert other["metrics.jsonl"] != expected["metrics.jsonl"]


def test_kills_leave_no_trace(undisturbed, tmp_path):
    command, expected, seconds = undisturbed
    moments = (np.random.default_rng(0).uniform(0.4, 0.95, 2) * seconds).tolist()
    for part in (1.0, 0.5, 0.25):  # a machine that was slower a moment ago has ended before the kill
        killed = tmp_path / f"killed at {part}"
        if interrupted(command, killed, [part * moment for moment in moments]):
            break
    else:
        raise AssertionError("no kill hit a live run")
    assert fingerprint(killed) == expected
