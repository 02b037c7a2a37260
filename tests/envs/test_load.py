"""An environment is found by its name and made with its options, and what is wrong is said before a
model is loaded."""

import json
import sys
from pathlib import Path

import pytest

from tandem.config.schema import Env as EnvConfig
from tandem.config.schema import Sandbox
from tandem.envs.load import load_env, source_files
from tandem.plugins.tasks.guess import GuessTheNumber
from tandem.runtime.errors import UserError
from tandem.types import Env

OWN = """
from tandem.types import Env

class Mine(Env):
    def __init__(self, names: list[str], size: int = 3):
        if size > 9:
            raise RuntimeError("too large")
        self.names, self.size = names, size

class Careful(Env):
    def __init__(self, sandbox, **others):
        self.sandbox, self.others = sandbox, others

class Plain(Env):
    pass

class Other:
    pass

def function():
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("x = 1\nx / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def made(name, **options):
    return load_env(EnvConfig(name=name, options=options), Sandbox())()


def test_a_class_of_ones_own_is_loaded_from_a_file_or_a_module(own):
    assert made("own.py:Mine", names=["a"]).names == ["a"]
    assert isinstance(made("own.py:Plain"), Env)
    assert type(made("tandem.plugins.tasks.guess:GuessTheNumber")) is GuessTheNumber


def test_every_episode_has_options_of_its_own(own):
    make = load_env(EnvConfig(name="own.py:Mine", options={"names": ["a"]}), Sandbox())
    make().names.append("b")
    assert make().names == ["a"]


def test_the_sandbox_section_goes_to_a_class_that_asks_for_it(own):
    sandbox = Sandbox(url="http://127.0.0.1:8080")
    env = load_env(EnvConfig(name="own.py:Careful", options={"size": 2}), sandbox)()
    assert (env.sandbox, env.others) == (sandbox, {"size": 2})


# name | options | where it is told | words
MISTAKES = """
gues | {} | env.name | no 'gues' among the envs | single_turn | did you mean guess?
guess | {"limt": 3} | env.options | 'limt' | limit: int = 0
guess | {"limit": "many"} | env.options.limit | 'many' | int
guess | {"limit": -2} | env.options.limit | -2
single_turn | {"limit": 3} | env.options | 'limit' | Env()
tools | {} | env.options.tools | no tools | calculator
tools | {"tools": ["calculator"], "format": "xml"} | env.options.format | hermes
own.py:Mine | {} | env.options | a required argument: 'names' | (names: list[str], size: int = 3)
own.py:Mine | {"names": "a"} | env.options.names | list[str] | 'a'
own.py:Mine | {"names": [], "size": 10} | own.py:Mine | RuntimeError: too large | own.py:7
own.py:Mina | {} | env.name | no 'Mina' in own.py | Mine, Careful, Plain, Other, function
own.py:Other | {} | env.name | own.Other | subclass of tandem.types.Env | class Other(Env):
own.py:function | {} | env.name | not an environment | function
missing.py:Mine | {} | env.name | no file missing.py | working directory
broken.py:Mine | {} | broken.py:2 | ZeroDivisionError | python broken.py
no_such_module:Mine | {} | env.name | ModuleNotFoundError | python -c "import no_such_module"
:Mine | {} | env.name | file.py:NAME or module:NAME
own.py | {} | env.name | file.py:NAME or module:NAME
""".strip()


@pytest.mark.parametrize("row", MISTAKES.splitlines())
def test_a_mistake_is_told_with_its_place_and_what_to_do(own, row):
    name, options, where, *words = row.split(" | ")
    with pytest.raises(UserError) as error:
        made(name, **json.loads(options))
    assert where in error.value.where
    assert [word for word in words if word not in str(error.value)] == []


def test_a_run_depends_on_the_files_of_ones_own(own):
    def files(name, **options):
        return source_files(EnvConfig(name=name, options=options))

    assert files("guess") == []
    assert files("own.py:Mine") == [Path("own.py")]
    assert files("tandem.plugins.tasks.guess:GuessTheNumber") == [
        Path(sys.modules["tandem.plugins.tasks.guess"].__file__)
    ]
    assert files("no_such_module:Mine") == []
    assert files("tools", tools=["calculator", "my.py:add"]) == [Path("my.py")]
    assert files("tools", tools="my.py:add") == [Path("my.py")]
