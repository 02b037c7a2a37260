"""A run of two ranks, one of which is killed with SIGKILL: the other ends, the same command goes
on, and what is left is what a run that was never stopped leaves."""

import pytest
from transformers import AutoModelForCausalLM

from tandem.model.load import load_model
from tests.support.runs import Forks, end_well, fingerprint, kill_rank, output, prepare
from tests.support.waiting import eventually

BEGIN_S, END_S = 300.0, 10.0
OTHERS = ["train.optimizer=muon", "run.save_every=1", "eval.every=0", "run.threads=1"]


@pytest.fixture
def command(tmp_path):
    command = prepare(tmp_path, steps=4, command="train")
    return [*command, "parallel.data=2", *OTHERS]


def end(forks, command, folder):
    end_well(forks.start(command, folder), folder)


def test_run_whose_ranks_are_killed_ends_as_one_that_was_never_stopped(tmp_path, command):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    forks = Forks()
    end(forks, command, whole)
    for rank, step in ((1, 1), (0, 3)):
        run = forks.start(command, killed)
        saved = killed / "checkpoints" / f"step_{step:06d}"
        assert eventually(lambda saved=saved: saved.exists(), within_s=BEGIN_S), output(killed)
        assert kill_rank(run.pid, rank, END_S) == "", output(killed)
        run.join(END_S)
    end(forks, command, killed)
    printed = output(killed)
    assert "rank 1 (pid " in printed and "was killed (by hand, or for want of memory)" in printed
    assert printed.count("resumed from step_") == 2
    assert fingerprint(killed) == fingerprint(whole)
    names = {path.name for path in (killed / "checkpoints" / "step_000004").iterdir()}
    assert {"policy-00001-of-00002.safetensors", "policy-00002-of-00002.safetensors"} <= names

    exported = killed / "hf" / "step_000004"
    assert len(list(exported.glob("model-0000*-of-00002.safetensors"))) == 2
    stock = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    assert all((stock[n] == w).all() for n, w in load_model(str(exported)).named_weights().items())
