"""P2: a killed run, started again by the same command, ends with the same bytes as one that was
never stopped. `make invariants only=kills` kills others, and moves them to other cores."""

import json

import pytest

from tandem.run_folder.metrics import read_metrics
from tests.support.runs import Forks, fingerprint, prepare, run

STEPS = 5  # a checkpoint after 3; the kill at the row of step 4 costs a step that had been told
KINDS = [
    *("dpo", "ppo, lora", "rendered turns", "bfloat16", "8-bit moments", "gemma2", "gemma3"),
    *("lfm2", "gemma4_text", "mamba2", "images", "qwen3_vl", "smolvlm"),
]
# the others at night
A_COMMIT = ("ppo, lora", "multi-turn, lora, partial")

AHEAD = [
    "partial",
    "multi-turn, two steps off",
    "three at once",
    "images, one step off",
    "multi-turn, lora, partial",
    "rendered turns, partial",
]


def by_need(kinds):
    return [k if k in A_COMMIT else pytest.param(k, marks=pytest.mark.nightly) for k in kinds]


@pytest.fixture(scope="module")
def forks():
    return Forks()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    command = prepare(folder)
    run(command, folder / "run")
    return command, fingerprint(folder / "run")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_that_changes_hands_changes_no_byte(dtype, forks, undisturbed, tmp_path):
    command, expected = undisturbed
    command = [*command, f"model.dtype={dtype}"]
    if dtype != "float32":
        forks.run(command, tmp_path / "kept")
        expected = fingerprint(tmp_path / "kept")
    shared = ["rollout.release_cache=true", "train.offload_optimizer=true"]
    forks.run([*command, *shared], tmp_path / "shared", kill_at_row=5)
    forks.run([*command, *shared], tmp_path / "shared")
    assert fingerprint(tmp_path / "shared") == expected
    if dtype == "float32":
        forks.run([*command, *shared, "rollout.workers=1"], tmp_path / "workers")
        assert fingerprint(tmp_path / "workers") == expected


def test_another_seed_gives_other_bytes(forks, undisturbed, tmp_path):
    command, expected = undisturbed
    forks.run([*command, "run.seed=1"], tmp_path / "other")
    other = fingerprint(tmp_path / "other")
    assert other.keys() == expected.keys()
    weights = [name for name in other if name.startswith(("checkpoints", "hf"))]
    assert not [name for name in (*weights, "metrics.jsonl") if other[name] == expected[name]]


def test_elements_sent_instead_of_tensors_change_no_byte(forks, tmp_path):
    """In bfloat16, with workers that run what they are sent."""
    command = [*prepare(tmp_path, steps=STEPS), "model.dtype=bfloat16", "eval.every=0"]
    sent = {}
    for delta in ("false", "elements"):
        deltas = ["rollout.workers=1", f"weights.delta={delta}", "train.learning_rate=1e-5"]
        forks.run([*command, *deltas], tmp_path / delta)
        rows = (tmp_path / delta / "timings.jsonl").read_text().splitlines()
        sent[delta] = [row["sync_bytes"] for row in map(json.loads, rows) if "sync_bytes" in row]
    assert fingerprint(tmp_path / "elements") == fingerprint(tmp_path / "false")
    assert len(sent["elements"]) == STEPS and sent["elements"][0] == sent["false"][0]
    assert 0 < max(sent["elements"][1:]) < min(sent["false"]) / 2


@pytest.mark.parametrize("kind", by_need(KINDS))
def test_kill_after_a_checkpoint_leaves_no_trace(kind, forks, tmp_path):
    command = prepare(tmp_path, steps=STEPS, command=kind)
    assert forks.run(command, tmp_path / "whole") == 0
    assert forks.run(command, tmp_path / "killed", kill_at_row=STEPS) != 0
    assert forks.run(command, tmp_path / "killed") == 0
    assert "resumed from step_000003" in (tmp_path / "killed/log.txt").read_text()
    assert fingerprint(tmp_path / "killed") == fingerprint(tmp_path / "whole")
    learned = [row for row in read_metrics(tmp_path / "whole") if row.get("grad_norm", 0) > 0]
    assert len(learned) >= STEPS - 1  # the step of a critic's warm-up has none


@pytest.mark.parametrize("kind", by_need(AHEAD))
def test_kill_while_rollouts_are_ahead_leaves_no_trace(kind, forks, tmp_path):
    """The killed run has a rollout worker, which gets weights by another transport, or two for
    three steps at once, and the one that is never stopped has none. The journal may then hold more
    than a checkpoint."""
    command = [*prepare(tmp_path, steps=STEPS, command=kind), "run.save_every=2", "eval.every=0"]
    assert forks.run([*command, "rollout.workers=0"], tmp_path / "whole") == 0
    several = {"three at once": 2, "images, one step off": 1, "rendered turns, partial": 3}
    workers = several.get(kind, int("lora" in kind))
    killed = [*command, f"rollout.workers={workers}"]
    if kind == "partial":
        killed = [*command, "rollout.workers=1", "weights.transport=collective"]
        killed += ["weights.delta=elements"]
    assert forks.run(killed, tmp_path / "killed", kill_at_row=STEPS - 1) != 0
    assert forks.run(killed, tmp_path / "killed") == 0
    assert fingerprint(tmp_path / "killed") == fingerprint(tmp_path / "whole")
