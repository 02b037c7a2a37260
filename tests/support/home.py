"""A folder with data, tiny models and a recipe for every command, and the command line as a
function."""

from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.run_folder.checkpoint import step_name
from tandem.run_folder.metrics import read_metrics
from tandem.runtime.errors import UserError
from tests.support.runs import prepare

STEPS = 2  # of a home that tests share


def make_home(folder, steps):
    """The recipe lacks only what makes it one of the commands."""
    prepare(folder, steps=steps, command="sft")
    text = (folder / "reward.py").read_text()
    (folder / "reward.py").write_text(
        text + "\ndef length(problem, completion):\n    return len(completion) / 100\n"
    )
    recipe = (folder / "recipe.toml").read_text()
    recipe = recipe.replace("[run]\n", f'[run]\nfolder = "{folder}/run"\n')
    recipe += 'data = "{0}/data/test.jsonl"\n'
    recipe += '[data]\ntrain = "{0}/data/train.jsonl"\n[model]\npath = "{0}/model"\n'
    recipe += '[reward]\nfunction = "{0}/reward.py:score"\n'
    (folder / "recipe.toml").write_text(recipe.format(folder))
    return folder


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def output_of(*arguments):
    """The output of a command that ended well."""
    result = invoke(*arguments)
    assert result.exit_code == 0, (arguments, result.exception or result.output)
    return result.output


def done(command, home, folder, *overrides):
    """The rows of metrics.jsonl of a command that ended well, and the directory that it
    exported."""
    output_of(command, home / "recipe.toml", f"run.folder={folder}", *overrides)
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    return rows, folder / "hf" / step_name(STEPS)


def mistake(*arguments):
    """The error of a command that a user got wrong, as text; nothing was trained."""
    result = invoke(*arguments)
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)
