"""A model's config.json that cannot be read, and a hub that cannot be reached: told at once, with
the file and its own cure."""

import json
import os
import subprocess
import sys

import pytest

from tandem.model.config_file import check_model, read_json
from tandem.runtime.errors import UserError
from tests.support.tiny import tiny_config


def damaged(folder, change):
    """A model directory whose config.json is change(text)."""
    tiny_config("llama").save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(change(path.read_text()))
    return str(folder)


def with_values(**values):
    return lambda text: json.dumps(json.loads(text) | values)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-40],
        lambda text: text.replace(",", "", 1),
        lambda text: "",
        lambda text: "[]",
        lambda text: "[" * 100_000,
        with_values(hidden_size=0),
        with_values(hidden_size="wide"),
        with_values(num_attention_heads=7),
        with_values(rope_parameters=5),
    ],
)
def test_a_broken_config_names_its_file_and_is_not_sent_to_the_hub(change, tmp_path):
    with pytest.raises(UserError, match="config cannot be read") as error:
        check_model(damaged(tmp_path, change), "critic.path")
    assert error.value.where == f"critic.path = {tmp_path}, config.json"
    assert error.value.next.startswith(f"mend {tmp_path}/config.json, or copy it again")
    assert "hub" not in str(error.value)


def test_any_other_file_of_a_model_is_named_too(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="the generation config cannot be read") as error:
        read_json(str(tmp_path), "generation_config.json", what="generation config")
    assert error.value.where == f"{tmp_path}, generation_config.json"
    assert f"mend {tmp_path}/generation_config.json" in error.value.next


def test_a_hub_that_cannot_be_reached_is_told_without_a_second_try(tmp_path):
    """In a process of its own: the libraries read the environment when they are imported."""
    code = "from tandem.model.config_file import check_model; check_model('owner/name')"
    variables = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": tmp_path}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "no such directory here, and of the hub: OSError: it cannot be reached" in result.stderr
    assert "Retry" not in result.stderr and "HF_HUB_OFFLINE=1" in result.stderr


@pytest.mark.parametrize(
    "path", ["/nowhere/model", "./nowhere", "../nowhere", "runs/warm/hf", "here/nowhere", "nowhere"]
)
def test_a_missing_model_directory_is_not_sought_on_the_hub(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(UserError, match="the model directory does not exist"):
        check_model(path)
