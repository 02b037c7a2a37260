"""The command as a user runs it: in a process of its own, judged by exit code, output and what it
imported."""

import subprocess
import sys

import pytest

from tandem import __version__
from tandem.config.recipe import describe
from tests.support.command import ROOT, assert_is_a_users_error, tandem


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["version"], ["--version"]], ids=" ".join
)
def test_help_and_version_come_before_torch(arguments, tmp_path):
    code, stdout, _, torch = tandem(*arguments, cwd=tmp_path)
    assert code == 0 and not torch
    assert stdout.strip() == __version__ if arguments[0].endswith("version") else "Usage" in stdout


def test_bare_command_shows_help_and_unknown_one_is_an_error(tmp_path):
    _, stdout, stderr, torch = tandem(cwd=tmp_path)
    assert "Usage" in stdout + stderr and "Traceback" not in stderr and not torch
    code, _, stderr, torch = tandem("trian", cwd=tmp_path)
    assert code == 2 and "trian" in stderr and "Traceback" not in stderr and not torch


def test_a_folder_in_the_way_of_a_tiny_model_is_printed_before_torch_is_imported(tmp_path):
    (tmp_path / "there").mkdir()
    write(tmp_path / "there/chats.jsonl", "{}\n")
    result = tandem("tiny", "there", "--from", "there/chats.jsonl", cwd=tmp_path)
    assert_is_a_users_error(result, "something at the model's place", "there", torch=False)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_missing_recipe_is_printed_before_torch_is_imported(command, tmp_path):
    result = tandem(command, "none.toml", cwd=tmp_path)
    assert_is_a_users_error(result, "the recipe does not exist", "none.toml", torch=False)


@pytest.mark.parametrize("command", ["sft", "eval"])
def test_config_mistakes_are_printed_before_torch_is_imported(command, tmp_path):
    write(tmp_path / "r.toml", "[rl]\ngrop_size = 4\n")
    result = tandem(command, "r.toml", "run.seed=x", cwd=tmp_path)
    assert_is_a_users_error(
        result, "2 mistakes", "rl.group_size", "r.toml", "run.seed (command line)", torch=False
    )


def test_broken_invariant_is_printed_as_a_bug_with_its_traceback(tmp_path):
    program = (
        "import tandem.cli.main as main\nfrom tandem.runtime.errors import InvariantError\n"
        "def app():\n    raise InvariantError('a token has changed', next='report this')\n"
        "main.app = app\nmain.run()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 1 and "bug: a token has changed" in result.stderr
    assert "Traceback" in result.stderr and "in app" in result.stderr


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    text = '{"prompt": "1 + 1 = ?", "answer": "2"}\n'
    return write(tmp_path_factory.mktemp("data") / "problems.jsonl", text)


def test_missing_data_error_names_the_key_and_the_file(tmp_path):
    write(tmp_path / "r.toml", "[data]\ntrain = 'none.jsonl'\n")
    assert_is_a_users_error(
        tandem("train", "r.toml", cwd=tmp_path), "data.train", "none.jsonl", torch=True
    )


def test_missing_model_error_names_the_key_and_the_directory(problems, tmp_path):
    write(tmp_path / "r.toml", f"[data]\ntrain = '{problems}'\n")
    result = tandem("train", "r.toml", "model.path=./none", cwd=tmp_path)
    assert_is_a_users_error(
        result, "the model directory does not exist", "model.path", "./none", torch=True
    )


def test_a_folder_that_is_no_run_cannot_be_exported(tmp_path):
    assert_is_a_users_error(
        tandem("export", tmp_path, cwd=tmp_path), "not a run folder", str(tmp_path), torch=True
    )


def test_plan_lists_every_key_with_its_default(tmp_path):
    code, stdout, _, _ = tandem("plan", "--keys", cwd=tmp_path)
    assert code == 0
    rows = {
        cells[1].strip(): cells[2].strip()
        for line in stdout.splitlines()
        if len(cells := line.split("│")) > 3
    }
    leaves = {key: default for key, default, _ in describe()}
    assert {key: default for key, default in rows.items() if key} == leaves
