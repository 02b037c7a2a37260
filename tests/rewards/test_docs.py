"""docs/guide/rewards.md does what it says: its functions run, its settings load, its table of examples is
so."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tandem.config.schema import Config
from tandem.registry import BUILT_IN
from tandem.rewards.load import load
from tandem.rewards.parts import check_functions, part_name
from tandem.types import Attempt, Problem

TEXT = (Path(__file__).parents[2] / "docs" / "guide" / "rewards.md").read_text()
FILES = {
    block.split()[1]: block
    for block in re.findall(r"```python\n(# \w+\.py\n.*?)```", TEXT, re.DOTALL)
}
EXAMPLES = [
    re.findall(r"`([^`]*)`", line)
    for line in TEXT.partition("<!-- examples: tested -->")[2]
    .partition("<!-- /examples -->")[0]
    .splitlines()[3:]
]


@pytest.fixture
def files(tmp_path, monkeypatch):
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)


def ask(function, text, answer="", options=None, **metadata):
    messages = ({"role": "user", "content": "?"},)
    problem = Problem(uid="p", messages=messages, answer=answer, metadata=metadata)
    talk = ({"role": "assistant", "content": text},)
    return load(function, options or {})(problem, Attempt(text=text, messages=talk))


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL))
def test_the_settings_are_valid_and_name_functions_that_load(files, block):
    how = Config.model_validate(tomllib.loads(block)).reward
    check_functions(how.functions, how.weights, how.options)
    assert [load(name, how.options.get(part_name(name), {})) for name in how.functions]


def test_the_functions_give_what_the_page_says(files):
    assert ask("my_reward.py:score", "it is 3", "3") == (1.0, {})
    assert ask("my_reward.py:brief", "x" * 120, options={"limit": 80}) == (-0.5, {})
    assert ask("my_reward.py:parts", "it is 3", "3") == (0.99, {"correct": 1.0, "turns": -0.01})
    assert ask("theirs.py:trl_style", "it is 3", "3") == (1.0, {})
    assert ask("theirs.py:trl_style", "it is 3", "") is None
    assert ask("theirs.py:compute_score", "it is 3", "3") == (1.0, {"acc": 1.0})


@pytest.mark.parametrize("row", EXAMPLES, ids=lambda row: row[0])
def test_the_examples_are_so(row):
    function, answer, completion, options, reward = row
    truth = ast.literal_eval(answer)
    given = {"answer": truth} if isinstance(truth, str) else truth
    text = ast.literal_eval(completion)
    assert ask(function, text, options=ast.literal_eval(options), **given)[0] == float(reward)


def test_every_built_in_is_on_the_page():
    table = TEXT.partition("## Built in")[2].partition("<!-- examples")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(BUILT_IN["rewards"])
