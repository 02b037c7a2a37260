"""Models in several files, with tied and untied heads: loaded, checked, trained and exported as one
file is."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandem.model.load import load_model
from tandem.model.stock import INDEX, check_sums
from tandem.run_folder.export import export
from tandem.run_folder.read import open_past
from tandem.runtime.errors import UserError
from tests.support.home import make_home, output_of
from tests.support.tiny import same_weights


def reshape(folder, *, tied, size="20KB"):
    """Write a model directory anew: its head tied or not, its weights in files of at most size."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.5)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size=size)


def shards(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def home(request, tmp_path_factory):
    home = make_home(tmp_path_factory.mktemp("home"), steps=2)
    reshape(home / "model", tied=request.param)
    names = set(json.loads((home / "model" / INDEX).read_text())["weight_map"])
    assert len(shards(home / "model")) > 3 and ("lm_head.weight" in names) is not request.param
    return home


@pytest.fixture(scope="module")
def run(home, tmp_path_factory):
    run = tmp_path_factory.mktemp("run") / "run"
    changes = ["rl.kl_coef=0.05", "train.learning_rate=1e-2"]
    output_of("train", home / "recipe.toml", f"run.folder={run}", *changes)
    return run


def test_run_on_several_files_is_the_run_on_one(home, run, tmp_path):
    past = open_past(run)
    assert past.metrics[1]["reference_kl"] == past.metrics[2]["logprob_gap"] == 0
    assert {f"model.path/{name}" for name in shards(home / "model")} <= past.inputs().keys()
    whole = shutil.copytree(home / "model", tmp_path / "whole")
    weights = {k: v for name in shards(whole) for k, v in load_file(whole / name).items()}
    for name in (*shards(whole), INDEX):
        (whole / name).unlink()
    save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
    other = tmp_path / "other"
    changes = ["rl.kl_coef=0.05", f"model.path={whole}", "train.learning_rate=1e-2"]
    output_of("train", home / "recipe.toml", f"run.folder={other}", *changes)
    hashes = [[row["weights"] for row in open_past(one).ledger.values()] for one in (run, other)]
    assert hashes[0] == hashes[1]


def test_export_in_several_files_has_the_weights_of_one(run, tmp_path):
    out = tmp_path / "out"
    output_of("export", run, "--out", out, "--max-shard-size", "20KB")
    [one] = (run / "hf").iterdir()
    assert shards(one) == ["model.safetensors"] and len(shards(out)) > 3
    check_sums(str(out))
    model = load_model(str(one))
    assert same_weights(model, load_model(str(out)))
    stock = AutoModelForCausalLM.from_pretrained(out)
    assert stock.config.tie_word_embeddings is ("lm_head.weight" not in model.named_weights())


def test_damaged_and_missing_file_of_several_is_named(run, tmp_path):
    [one] = (run / "hf").iterdir()
    folder = export(load_model(str(one)), str(one), tmp_path / "out", "", max_shard_size="20KB")
    second = folder / shards(folder)[1]
    weights = load_file(second)
    save_file({k: v + 1 for k, v in weights.items()}, second, metadata={"format": "pt"})
    with pytest.raises(UserError, match="not those that were exported") as error:
        load_model(str(folder))
    assert second.name in str(error.value)
    (folder / "SHA256SUMS").unlink()
    second.unlink()
    with pytest.raises(UserError, match="cannot be loaded") as error:
        load_model(str(folder))
    assert second.name in str(error.value)
