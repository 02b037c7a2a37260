"""A model that cannot be exact, by the command: it learns, says what it is, and its run can be
replayed; without a correction it is refused."""

import json

import pytest

from tandem.run_folder.metrics import read_metrics
from tests.support.architectures import save_architecture
from tests.support.home import mistake, output_of

STEPS = 8
RECIPE = """
run.steps = {steps}
rollout.max_new_tokens = 8
rl.prompts_per_step = 4
rl.group_size = 8
rl.correction = "tis"
train.learning_rate = 1e-2
data.train = "{folder}/problems.jsonl"
reward.function = "{folder}/reward.py:share"
model.path = "{folder}/model"
"""
REWARD = """
def share(problem, completion):
    return sum(c in "aeiou" for c in completion) / 8
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inexact")
    save_architecture("qwen3_5_text", folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{'x' * (n % 3)}{n}?", "answer": "a"} for n in range(12)]
    (folder / "problems.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "recipe.toml").write_text(RECIPE.format(steps=STEPS, folder=folder))
    return folder


@pytest.fixture(scope="module")
def trained(home):
    run = home / "run"
    return run, output_of("train", home / "recipe.toml", f"run.folder={run}")


def test_a_run_says_at_its_start_that_it_is_not_exact(trained):
    _, output = trained
    first = " ".join(output.partition("\n")[2].split())  # behind who started it
    assert first.startswith(
        "NOT exact: engine and trainer compute differently (architecture qwen3_5_text"
    )
    assert "gap measured each step" in first


def test_it_learns_and_its_gap_is_measured(trained):
    folder, _ = trained
    rows = read_metrics(folder)[1:]
    gaps = [(row["logprob_gap_mean"], row["logprob_gap"]) for row in rows[:5]]
    assert all(0 < mean <= largest < 1e-4 for mean, largest in gaps), gaps
    # the least of ten seeds is 0.55 more; an untrained model stays within 0.1
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.3


def test_replay_learns_a_step_again(trained):
    folder, _ = trained
    told = " ".join(output_of("replay", folder, "--step", 2).split())
    assert "equal: step 2" in told and "not compared bit by bit" in told


def test_evaluation_needs_no_correction(home, tmp_path):
    changes = [f"eval.data={home}/problems.jsonl", "rl.correction=none"]
    output = output_of("eval", home / "recipe.toml", *changes, "--out", tmp_path / "means.json")
    assert "NOT exact" in output
    assert json.loads((tmp_path / "means.json").read_text())["eval/sampled"] >= 0


@pytest.mark.parametrize("command", ["train", "distill"])
def test_training_without_a_correction_is_refused(command, home, tmp_path):
    settings = ["rl.correction=none", f"distill.teacher={home}/model"]
    error = mistake(command, home / "recipe.toml", f"run.folder={tmp_path}/run", *settings)
    assert "not the trainer's to the last bit" in error
    assert "qwen3_5_text: its layers keep a state" in error
    assert "rl.correction=tis" in error
