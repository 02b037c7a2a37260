"""`tandem export --best`, and `--push` against a stand-in hub on loopback."""

import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from tandem.run_folder.best import Best, write_best
from tests.support.architectures import save_architecture
from tests.support.home import make_home, mistake, output_of
from tests.support.hub import Hub
from tests.support.past_runs import past_run


@pytest.fixture
def use(monkeypatch):
    """use(address of a hub, token): what the hub's client reads from the environment once."""

    def use(url, token="x", offline=False):
        own = {"ENDPOINT": url, "HF_HUB_OFFLINE": offline, "HF_HUB_DISABLE_XET": True}
        for name, value in own.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", token)

    return use


@pytest.fixture
def run(tmp_path):
    run = shutil.copytree(past_run("train"), tmp_path / "run")
    shutil.rmtree(run / "hf")
    return run


def test_export_is_pushed_with_a_card_of_its_origin(run, use):
    with Hub("secret") as hub:
        # of an adapter that was pushed before, which would change the model
        hub.files["me/mine"] = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"1"}
        use(hub.url, "secret")
        text = output_of("export", run, "--push", "me/mine")
        assert f"pushed to {hub.url}/me/mine" in text.replace("\n", "") and hub.unknown == []
        why = mistake("export", run, "--out", run / "more", "--push", "a/b/c")
        assert "HFValidationError" in why
    assert hub.repositories == {"me/mine": True}  # private
    [folder] = (run / "hf").iterdir()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.files == {"me/mine": files}
    assert [*hub.objects.values()] == [files["model.safetensors"]]  # in LFS
    card = files["README.md"].decode()
    told = ("after `tandem train`", "seed 0", "rl.group_size = ", "data.train", "torch ")
    assert all(text in card for text in told), card
    assert "eval/sampled" in card


def test_hub_that_does_not_take_the_model_is_a_users_error(run, use):
    with Hub("secret") as hub:
        hubs = {"401": (hub.url, "other"), "127.0.0.1:9": ("http://127.0.0.1:9",)}
        hubs["OfflineModeIsEnabled"] = (hub.url, "secret", True)
        for found, hub_and_token in hubs.items():
            use(*hub_and_token)
            out = run / found
            text = mistake("export", run, "--out", out, "--push", "me/mine")
            assert "the hub did not take the model" in text and found in text and out.exists()


# ---- --best


def test_best_checkpoint_is_exported_by_name(run):
    write_best(run, Best(step=3, reward=0.9, misses=1))
    output_of("export", run, "--best")
    assert [path.name for path in (run / "hf").iterdir()] == ["step_000003"]
    assert "one of them" in mistake("export", run, "--best", "--step", 4)


@pytest.mark.parametrize(
    ("best", "said"),
    [
        (None, "has kept no best checkpoint"),
        (Best(step=0, reward=0.9, misses=4), "no step of the run is better than its starting"),
        (Best(step=2, reward=0.9, misses=1), "there is no such checkpoint"),  # pruned since
    ],
    ids=["none", "the starting model", "gone"],
)
def test_run_without_a_best_checkpoint_is_a_users_error(best, said, run):
    if best is not None:
        write_best(run, best)
    assert said in mistake("export", run, "--best") and not (run / "hf").exists()


def test_checkpoint_is_exported_with_buffers_that_no_training_changes(tmp_path):
    home = make_home(tmp_path, steps=1)
    shutil.rmtree(home / "model")
    save_architecture("deepseek_v3", home / "model")
    output_of("sft", home / "recipe.toml", f"sft.train={home}/data/warm.jsonl", "sft.steps=1")
    shutil.rmtree(home / "run" / "hf")
    output_of("export", home / "run")
    [folder] = (home / "run" / "hf").iterdir()
    before, after = (load_file(path / "model.safetensors") for path in (home / "model", folder))
    biases = [name for name in before if "correction_bias" in name]
    assert before.keys() == after.keys() and len(biases) == 2
    assert all(torch.equal(before[name], after[name]) for name in biases)
