"""The command as a user runs it, judged by exit code, output and what it imported."""

import subprocess
import sys

from tandem.config.recipe import describe
from tandem.runtime.version import __version__
from tests.support.command import ROOT, assert_is_a_users_error, in_own_process, tandem
from tests.support.home import invoke


def test_help_version_and_mistakes_in_a_recipe_come_before_torch(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/chats.jsonl").write_text("{}\n")
    (tmp_path / "r.toml").write_text("[rl]\ngrop_size = 4\n")
    mistakes = ["2 mistakes", "rl.group_size", "r.toml", "run.seed (command line)"]
    commands = {  # words of stdout, or of stderr where it ends with 2
        "--help": ["Usage"],
        "train --help": ["Usage"],
        "view --help": ["--token"],
        "version": [__version__],
        "--version": [__version__],
        "": ["Usage"],
        "trian": ["trian"],
        "tiny there --from there/chats.jsonl": ["something at the model's place", "there"],
        "train none.toml": ["the recipe does not exist", "none.toml"],
        "plan none.toml": ["the recipe does not exist", "none.toml"],
        "plan rl.num_generations=4": ["an override", "RECIPE rl.num_generations=4"],
        "train --steps 3": ["tandem train has no option --steps", "did you mean run.steps=3 or"],
        "sft r.toml run.seed=x": mistakes,
        "eval r.toml run.seed=x": mistakes,
        "serve no/model --host 0.0.0.0": ["needs a token", "0.0.0.0", "TANDEM_API_KEY"],
        "init there": ["there", "name another folder"],
        "view no-such-folder": ["no runs to view", "no-such-folder"],
        "report .": ["not a run folder"],
        "plot . -o x.pdf": ["as SVG or PNG", "x.pdf", "x.svg"],
        "status .": ["not a run folder"],
    }
    told = in_own_process(*map(str.split, commands), cwd=tmp_path)
    for (command, words), result in zip(commands.items(), told, strict=True):
        code, stdout, stderr, torch = result
        assert not torch, command
        if command in ("", "trian"):  # typer's own words
            assert code == 2 and all(word in stdout + stderr for word in words), result
        elif code == 2:
            assert_is_a_users_error(result, *words)
        else:
            assert code == 0 and all(word in stdout for word in words), (command, result)
    assert told[3][1].strip() == told[4][1].strip() == __version__


def test_broken_invariant_is_printed_as_a_bug_with_its_traceback():
    program = (
        "import tandem.cli.main as main\nfrom tandem.runtime.errors import InvariantError\n"
        "def app():\n    raise InvariantError('a token has changed', next='report this')\n"
        "main.app = app\nmain.run()"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1 and "bug: a token has changed" in result.stderr
    assert "Traceback" in result.stderr and "in app" in result.stderr


def test_plan_lists_every_key_with_its_default(tmp_path):
    code, stdout, _ = tandem("plan", "--keys", cwd=tmp_path)
    assert code == 0
    rows = {
        cells[1].strip(): cells[2].strip()
        for line in stdout.splitlines()
        if len(cells := line.split("│")) > 3
    }
    leaves = {key: default for key, default, _ in describe()}
    assert {key: default for key, default in rows.items() if key} == leaves


def test_an_override_that_the_command_does_not_read_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.cli.train.train", lambda *_: None)
    (recipe := tmp_path / "r.toml").write_text("")
    found = invoke("dpo", recipe, "run.steps=3", "preference.steps=3").stderr
    assert found == "warning: tandem dpo does not read run.steps; did you mean preference.steps?\n"
