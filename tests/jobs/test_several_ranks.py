"""Whole runs of several ranks that Tandem starts: they end well, and the engine's log-probs are the
trainer's."""

import pytest

from tandem.run_folder.metrics import read_metrics
from tests.support.runs import Forks, output, prepare

RUNS = {  # kind, overrides
    # a microbatch for each of the 8 problems: with three ranks some have none, and are idle
    "reference": ("train", ["rl.kl_coef=0.05", "rl.minibatches=8", "parallel.data=3"]),
    "critic": ("bfloat16", ["parallel.data=2"]),
    "pairs": ("dpo", ["parallel.data=2"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_run_of_several_ranks_ends_well(name, tmp_path):
    kind, overrides = RUNS[name]
    command = prepare(tmp_path, steps=2, command=kind)
    run = Forks().start([*command, *overrides, "eval.every=0", "run.threads=1"], tmp_path / "run")
    run.join()
    assert run.exitcode == 0, output(tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["step"] == 2 and all(row.get("logprob_gap", 0.0) == 0.0 for row in rows)
    assert any(row.get("grad_norm", 0.0) > 0 for row in rows)
