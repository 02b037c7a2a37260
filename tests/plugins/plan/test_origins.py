"""The origin of every value: the line of a recipe, the command line, the algorithm, the default."""

import tomllib
from pathlib import Path

import pytest

from tandem.config.recipe import describe, load_config
from tandem.config.schema import SHORTHANDS
from tandem.plugins.plan.origins import line_numbers, origins

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))
TEXT = '''reward = "answer"
# rl.group_size = 1
[data]
train = [
  "a.jsonl",  # [run]
  "b.jsonl",
]
system = """
[rl]
group_size = 5
"""
[rl] # the algorithm
algorithm = "dapo"
group_size = 4
"clip_high" = 0.3

[env.options]
limit = 3
'''


def found(folder, *overrides):
    path = folder / "my.toml"
    path.write_text(TEXT)
    load_config(path, list(overrides))  # it is a recipe that a run takes
    named = origins(path, list(overrides))
    assert list(named) == [key for key, _, _ in describe()]
    return {key: origin.replace(f"{folder}/", "") for key, origin in named.items()}


def test_lines_are_where_statements_begin_whatever_their_texts_say():
    assert line_numbers(TEXT) == {
        "reward.function": 1,
        "data.train": 4,
        "data.system": 8,
        "rl.algorithm": 13,
        "rl.group_size": 14,
        "rl.clip_high": 15,
        "env.options": 17,
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_key_of_a_recipe_has_the_line_that_names_it(path):
    text = path.read_text()
    rows, tree = text.split("\n"), tomllib.loads(text)
    for section, fields in tree.items():
        if isinstance(fields, str):  # `reward = "answer"`
            line = line_numbers(text)[f"{section}.{SHORTHANDS[section]}"]
            assert rows[line - 1].startswith(f"{section} =")
            continue
        for name in fields:
            row = rows[line_numbers(text)[f"{section}.{name}"] - 1]
            assert row.startswith((f"{name} =", f"[{section}.{name}]"))


def test_file_algorithm_and_default_are_told_apart(tmp_path):
    named = found(tmp_path)
    assert named["reward.function"] == "my.toml:1" and named["rl.group_size"] == "my.toml:14"
    assert named["rl.clip_high"] == "my.toml:15"  # above the algorithm's
    assert named["rl.max_gen_batches"] == named["rl.aggregation"] == "rl.algorithm=dapo"
    assert named["rl.clip_low"] == named["run.steps"] == "default"


def test_the_command_line_replaces_the_file_but_for_entries_of_a_table(tmp_path):
    named = found(tmp_path, "rl.group_size=8", "env.options.wide=true", "reward=exact")
    assert named["rl.group_size"] == named["reward.function"] == "command line"
    assert named["env.options"] == "my.toml:17, command line"
    assert found(tmp_path, "env.options={limit = 1}")["env.options"] == "command line"


def test_another_algorithm_on_the_command_line_drops_what_the_file_says_of_one(tmp_path):
    named = found(tmp_path, "rl.algorithm=gspo")
    assert named["rl.algorithm"] == "command line"
    assert named["rl.clip_high"] == named["rl.clip_low"] == "rl.algorithm=gspo"
    assert named["rl.max_gen_batches"] == "default"
