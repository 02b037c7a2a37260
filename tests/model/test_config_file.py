"""A model's config.json that cannot be read: told with the file and its own cure."""

import json

import pytest

from tandem.model.config_file import check_model
from tandem.runtime.errors import UserError
from tests.support.tiny import tiny_config


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-40],
        lambda text: text.replace(",", "", 1),
        lambda text: "",
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: json.dumps(json.loads(text) | {"hidden_size": "wide"}),
        lambda text: json.dumps(json.loads(text) | {"rope_parameters": 5}),
    ],
)
def test_a_broken_config_names_its_file_and_is_not_sent_to_the_hub(change, tmp_path):
    tiny_config("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=r"config\.json cannot be read") as error:
        check_model(str(tmp_path), "critic.path")
    assert error.value.where == f"critic.path = {tmp_path}, config.json"
    assert error.value.next.startswith(f"mend {tmp_path}/config.json, or copy it again")
    assert "hub" not in str(error.value)


@pytest.mark.parametrize(
    "path", ["/nowhere/model", "./nowhere", "../nowhere", "runs/warm/hf", "here/nowhere", "nowhere"]
)
def test_a_missing_model_directory_is_not_sought_on_the_hub(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(UserError, match="the model directory does not exist"):
        check_model(path)
