"""`tandem export --best`, and `--push` against a stand-in hub on loopback."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from tandem.run_folder.best import Best, write_best
from tests.support.architectures import save_architecture
from tests.support.command import in_own_process
from tests.support.home import make_home, mistake, output_of
from tests.support.hub import Hub
from tests.support.past_runs import past_run


def pushed(run, *names, **variables):
    """(exit code, what was printed) of exports of a run to a hub, one after another."""
    variables = {"HOME": "/nowhere", "HF_HUB_DISABLE_XET": "1", **variables}
    commands = [["export", str(run), "--push", name] for name in names]
    found = in_own_process(
        *commands, cwd=run, NO_PROXY="127.0.0.1", HF_HUB_DISABLE_PROGRESS_BARS="1", **variables
    )
    return [(code, stdout + stderr) for code, stdout, stderr, _ in found]


@pytest.fixture
def run(tmp_path):
    run = shutil.copytree(past_run("train"), tmp_path / "run")
    shutil.rmtree(run / "hf")
    return run


def test_export_is_pushed_with_a_card_of_its_origin(run):
    with Hub("secret") as hub:
        # of an adapter that was pushed before, which would change the model
        hub.files["me/mine"] = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"1"}
        pushes = pushed(run, "me/mine", "a/b/c", HF_ENDPOINT=hub.url, HF_TOKEN="secret")
        [(code, text), (misnamed, why)] = pushes
        assert code == 0, text
        assert misnamed == 2 and "HFValidationError" in why and "Traceback" not in why, why
        assert f"pushed to {hub.url}/me/mine" in text and hub.unknown == []
    assert hub.repositories == {"me/mine": True}  # private
    [folder] = (run / "hf").iterdir()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.files == {"me/mine": files} and "model.safetensors" in files
    card = files["README.md"].decode()
    told = ("after `tandem train`", "seed 0", "rl.group_size = ", "data.train", "torch ")
    assert all(text in card for text in told), card
    assert "eval/sampled" in card


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "OfflineModeIsEnabled"),
        ({"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}, "127.0.0.1:9"),
    ],
    ids=["offline", "unreachable"],
)
def test_hub_that_cannot_be_used_is_a_users_error(variables, found, run):
    [(code, text)] = pushed(run, "me/mine", HF_TOKEN="x", **variables)
    assert code == 2 and "the hub did not take the model" in text and "Traceback" not in text, text
    assert found in text and (run / "hf").exists(), text


def test_wrong_token_is_a_users_error(run):
    with Hub("secret") as hub:
        [(code, text)] = pushed(run, "me/mine", HF_ENDPOINT=hub.url, HF_TOKEN="other")
    assert code == 2 and "401" in text and "Traceback" not in text, text


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
    chats = f"sft.train={home}/data/warm.jsonl"
    output_of("sft", home / "recipe.toml", chats, "sft.steps=1")
    shutil.rmtree(home / "run" / "hf")
    output_of("export", home / "run")
    [folder] = (home / "run" / "hf").iterdir()
    before, after = (load_file(path / "model.safetensors") for path in (home / "model", folder))
    biases = [name for name in before if "correction_bias" in name]
    assert before.keys() == after.keys() and len(biases) == 2
    assert all(torch.equal(before[name], after[name]) for name in biases)
