"""Whole runs of several ranks that Tandem starts: they end well, and the engine's log-probs are the
trainer's."""

import pytest

from tandem.model.load import load_model
from tandem.model.placement import place_models
from tandem.model.tiny import make_tiny
from tandem.run_folder.metrics import read_metrics
from tandem.run_folder.read import open_past
from tandem.weights.hashing import weight_hash
from tests.support.runs import Forks, end_well, fingerprint, prepare, run

RUNS = {  # kind, overrides
    # a microbatch for each of the 8 problems: one rank has none, and is idle
    "reference and critic": ("bfloat16", ["rl.minibatches=8", "parallel.data=2"]),
    "pairs": ("dpo", ["parallel.data=2"]),
}


def metrics_of(command, folder):
    end_well(Forks().start([*command, "eval.every=0", "run.threads=1"], folder), folder)
    return read_metrics(folder)


@pytest.mark.parametrize("name", RUNS)
def test_run_of_several_ranks_ends_well(name, tmp_path):
    kind, overrides = RUNS[name]
    rows = metrics_of([*prepare(tmp_path, steps=2, command=kind), *overrides], tmp_path / "run")
    assert rows[-1]["step"] == 2 and all(row.get("logprob_gap", 0.0) == 0.0 for row in rows)
    assert any(row.get("grad_norm", 0.0) > 0 for row in rows)
    place = place_models("cpu", open_past(tmp_path / "run").config.model.dtype)
    exported = load_model(str(tmp_path / "run/hf/step_000002"), place=place)
    ledger = read_metrics(tmp_path / "run", "ledger.jsonl")
    assert weight_hash(exported.merged()) == ledger[-1]["weights"]


def test_run_that_has_stopped_early_exports_the_same_weights_again(tmp_path):
    watched = ["eval.every=1", "eval.patience=1", "eval.samples=1", "eval.greedy=false"]
    command = [*prepare(tmp_path), *watched, "parallel.data=2", "run.threads=1"]
    for _ in range(2):
        end_well(Forks().start(command, tmp_path / "run"), tmp_path / "run")
    log = (tmp_path / "run/log.txt").read_text()
    ends = [line.partition(" ")[2] for line in log.splitlines() if " done: " in line]
    assert "stopped early" in log and len(ends) == 2 and ends[0] == ends[1]


def test_teacher_of_another_shape_grades_as_in_one_process(tmp_path):
    command = prepare(tmp_path, steps=2, command="distill")
    make_tiny(tmp_path / "larger", hidden=48, layers=3, intermediate=96, seed=1)
    command.append(f"distill.teacher={tmp_path / 'larger'}")
    alone = metrics_of(command, tmp_path / "alone")
    several = metrics_of([*command, "parallel.data=2"], tmp_path / "several")
    # gradients are added up in another order
    expected = [pytest.approx(row["teacher_kl"], rel=1e-5) for row in alone[1:]]
    assert [row["teacher_kl"] for row in several[1:]] == expected


def test_torchrun_or_rollout_workers_beside_ranks_change_no_bit(tmp_path):
    command = [*prepare(tmp_path, steps=2), "parallel.data=2", "eval.every=0", "run.threads=1"]
    end_well(Forks().start(command, tmp_path / "own"), tmp_path / "own")
    end_well(Forks().start([*command, "rollout.workers=2"], tmp_path / "more"), tmp_path / "more")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    torchrun.append(f"--log-dir={tmp_path / 'logs'}")
    run([command[0], *torchrun, *command[1:]], tmp_path / "torchrun")
    own, *others = (fingerprint(tmp_path / name) for name in ("own", "more", "torchrun"))
    assert others == [own, own]
