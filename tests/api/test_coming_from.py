"""Scripts of TRL and verl, and what becomes of them here: both run, and the page has every name."""

import re
import sys
from pathlib import Path

import pytest

import tandem
from examples import from_trl
from tandem.model.tiny import make_tiny
from tests.support.command import tandem as command
from tests.support.datasets import write_algebra

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| .*", (ROOT / "docs/guide/migrate.md").read_text(), re.M)
NAMED = {name for row in ROWS for name in re.findall(r"`([\w.]+)", row)}


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tiny(tmp_path / "model", hidden=32, layers=2, intermediate=64)
    return str(tmp_path / "model")


def test_trls_script_and_its_port_score_as_many_completions_in_a_step(model, monkeypatch):
    pytest.importorskip("trl")
    score, scored = from_trl.reward, []

    def counting(completions, **columns):
        scored.extend(completions)
        return score(completions, **columns)

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)  # its import leaves folders
        patch.setattr(from_trl, "reward", counting)
        from_trl.with_trl(model, steps=1, use_cpu=True, bf16=False)
    run = from_trl.with_tandem(model, steps=1)
    assert len(scored) == len(run.episodes(1)) == 32
    names = re.findall(r"^ {12}(\w+)=", Path(from_trl.__file__).read_text(), re.M)
    assert len(names) > 8 and {*names} - NAMED == set()


def test_verls_command_has_its_names_on_the_page_and_its_port_runs(model):
    keys = re.findall(r"([\w.]+)=", (ROOT / "examples/from_verl.sh").read_text())
    assert len(keys) > 15 and {*keys} - NAMED == set()
    write_algebra(Path("data"), num_train=8, num_test=8, num_warm=1)
    small = ["rl.prompts_per_step=4", "rl.minibatches=2", "rollout.max_new_tokens=4"]
    small += ["train.tokens_per_microbatch=1024", "run.trackers=[]", "run.steps=1"]
    small += ["data.train=data/train.jsonl", "eval.data=data/test.jsonl", f"model.path={model}"]
    recipe = ROOT / "examples/from_verl.toml"
    code, *_ = command("train", recipe, "run.folder=run", *small, cwd=".")
    assert code == 0 and len(tandem.Run("run").episodes(1)) == 20
