"""`tandem init` and the inputs of `tandem demo`: what they write, and that a run could start with
it."""

import shlex
import tomllib

import pytest

from tandem.config.recipe import load_config
from tandem.plugins.start.demo import RECIPE, make_inputs, settings
from tandem.runtime.errors import UserError
from tests.support.command import tandem


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project as `tandem init` writes it."""
    folder = tmp_path_factory.mktemp("init")
    code, stdout, stderr = tandem("init", "mine", cwd=folder)
    assert code == 0 and not stderr and "cd mine && tandem sft recipe.toml" in stdout
    assert "tandem view" in stdout
    return folder / "mine"


@pytest.mark.parametrize("command", ["sft", "train"])
def test_a_run_could_start_in_a_new_project(project, command):
    code, stdout, stderr = tandem("plan", "recipe.toml", "--for", command, cwd=project)
    assert code == 0, stdout + stderr


def test_the_reward_of_a_new_project_scores_its_problems(project):
    shown = shlex.split((project / "reward.py").read_text().splitlines()[2])
    code, stdout, _ = tandem(*shown[1:], cwd=project)
    assert code == 0 and "reward 1" in stdout
    code, stdout, _ = tandem(*shown[1:-1], f"{shown[-1]} or so", cwd=project)
    assert code == 0 and "reward 0" in stdout


def test_the_commands_of_its_readme_name_what_is_there(project):
    readme = (project / "README.md").read_text()
    commands = [line.split()[1] for line in readme.splitlines() if line.startswith("    tandem ")]
    assert commands == ["sft", "plan", "train", "view", "show"]
    steps = tomllib.loads((project / "recipe.toml").read_text())["sft"]["steps"]
    assert f"model.path=runs/recipe-sft/hf/step_{steps:06d}" in readme


def test_a_project_is_the_same_every_time_and_has_one_model(project, tmp_path):
    tandem("init", "mine", cwd=tmp_path)
    assert files_of(tmp_path / "mine") == files_of(project)
    code, *_ = tandem("init", "other", "--model", str(project / "model"), cwd=tmp_path)
    assert code == 0
    names = ["README.md", "recipe.toml", "reward.py", "test.jsonl", "train.jsonl"]
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == names
    assert load_config(tmp_path / "other" / "recipe.toml", []).model.path == str(project / "model")
    code, stdout, stderr = tandem("plan", "recipe.toml", cwd=tmp_path / "other")
    assert code == 0, stdout + stderr


def test_demo_writes_its_recipe_data_and_model_once(tmp_path):
    make_inputs(tmp_path, 0)
    written = files_of(tmp_path)
    assert written["demo.toml"] == RECIPE.read_bytes()
    assert 4 * 0.41e6 < len(written["model/model.safetensors"]) < 4 * 0.43e6
    assert {"data/train.jsonl", "data/test.jsonl", "data/warm.jsonl"} < set(written)
    config = load_config(tmp_path / "demo.toml", settings(tmp_path, 0, "sft", tmp_path / "model"))
    assert (config.sft.train, config.run.save_every) == (str(tmp_path / "data/warm.jsonl"), 100)
    make_inputs(tmp_path, 0)
    assert files_of(tmp_path) == written
    with pytest.raises(UserError, match="of another seed"):
        make_inputs(tmp_path, 1)


def test_a_model_of_this_folder_is_found_from_the_project_and_quotes_are_written(tmp_path):
    (tmp_path / 'a "model"').mkdir()
    code, *_ = tandem("init", "mine", "--model", 'a "model"', cwd=tmp_path)
    assert code == 0
    path = load_config(tmp_path / "mine" / "recipe.toml", []).model.path
    assert path == str((tmp_path / 'a "model"').resolve())
