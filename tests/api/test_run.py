"""Tandem from Python: the runs are those of the command line, and objects become files that any
process reads."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tandem
from tandem.api.given import named, overrides_of, source, values_of
from tandem.plugins.tasks.arithmetic import TASK
from tandem.rewards.load import load
from tandem.run_folder.metrics import read_metrics
from tandem.runtime.user_code import load_user_object
from tandem.types import Env, Problem
from tests.support.command import tandem as command

ROWS = [{"prompt": f"{n}+1=?", "answer": str(n + 1)} for n in range(6)]
BONUS = 0.25
UNREAD = [("sft", "epochs"), ("dpo", "kl_coef"), ("rm", "beta"), ("eval", "rl"), ("eval", "steps")]
NOTEBOOK = Path(__file__).parents[2] / "examples/first_run.ipynb"


def length(problem, completion):
    return len(completion) / 100 + BONUS * (problem.answer in completion)


def in_main(function):
    """The function as a notebook or a script defines it."""
    function.__module__ = "__main__"
    return function


@pytest.fixture(scope="module")
def model(home):
    return home / "model"


def given(model, **more):
    sizes = {"prompts_per_step": 2, "group_size": 2, "tokens_per_microbatch": 1024}
    sizes |= {"steps": 2, "max_new_tokens": 4}
    return {"model": model, "data": ROWS, "reward": in_main(length), **sizes, **more}


def test_a_run_is_that_of_the_command_line_and_a_second_call_resumes_it(model, tmp_path, capsys):
    rows = []
    run = tandem.train(**given(model, folder=tmp_path / "run"), callbacks=[rows.append])
    assert [row["step"] for row in rows] == [1, 2] and rows == read_metrics(run.folder)[1:]
    [recipe] = (tmp_path / "inputs").glob("run-*.toml")
    code, *_ = command("train", recipe, "run.folder=other", cwd=tmp_path)
    lines = (run.folder / "metrics.jsonl").read_bytes()
    assert code == 0 and (tmp_path / "other/metrics.jsonl").read_bytes() == lines
    assert (run.model_dir / "model.safetensors").exists() and len(run.episodes(1)) == 4
    assert list(run.metrics.index) == [0, 1, 2]

    tandem.train(**given(model, folder=tmp_path / "run", steps=3), callbacks=rows.append)
    assert "resumed from step_000002" in capsys.readouterr().out
    assert [row["step"] for row in rows[2:]] == [3]


def test_a_callback_and_an_interrupt_stop_a_run_which_is_saved(
    model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter does
    keys = given(model, folder=tmp_path / "run", steps=500, save_every=500)
    run = tandem.train(**keys, callbacks=[lambda row: np.bool_(row["step"] < 2)])
    stopped = max(row["step"] for row in read_metrics(run.folder))
    assert 2 <= stopped < 500 and (run.folder / f"checkpoints/step_{stopped:06d}").exists()
    model_dir = run.folder / f"hf/step_{stopped:06d}"
    assert run.model_dir == model_dir and (model_dir / "model.safetensors").exists()

    monkeypatch.chdir(tmp_path)
    relative = tandem.Run("run")
    monkeypatch.chdir("/")
    assert len(relative.metrics) == stopped + 1
    with socket.create_server(("127.0.0.1", 0)) as used, pytest.raises(tandem.UserError):
        run.view(used.getsockname()[1])

    def interrupt(row):
        if row["step"] == stopped + 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        run.resume(steps=600, callbacks=[interrupt])
    out = capsys.readouterr().out
    assert out.count("interrupted; the same command resumes") == 2 and "\x1b" not in out
    assert "steps = 600" in (run.folder / "config.toml").read_text()
    last = max(row["step"] for row in read_metrics(run.folder))
    assert (run.folder / f"checkpoints/step_{last:06d}").exists() and last > stopped


def test_mistakes_are_errors_of_the_caller(model, tmp_path, capsys):
    with pytest.raises(tandem.UserError, match=r"rl\.group_size"):
        tandem.train(**given(model, folder=tmp_path / "run", group_size="many"))
    with pytest.raises(tandem.UserError, match=r"did you mean rl\.group_size"):
        tandem.train(**given(model, groupsize=2))
    with pytest.raises(tandem.UserError, match=r"model\.path = nowhere"):
        tandem.train(**given("nowhere", folder=tmp_path / "run"))
    assert "error" not in capsys.readouterr().out
    with pytest.raises(tandem.UserError, match="not a run folder"):
        tandem.Run(tmp_path / "run")
    for recipe, callbacks in ((7, ()), (None, 3)):
        with pytest.raises(tandem.UserError, match=r"functions of a row|a file or a dict"):
            tandem.train(recipe, callbacks=callbacks)


def test_problems_are_generated_and_a_model_is_evaluated_on_them(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = [json.loads(json.dumps(row)) for row in TASK.rows("train", 4, 3, 1)]
    assert tandem.generate("arithmetic", 4, seed=3) == expected
    keys = {"model": model, "data": ROWS, "reward": in_main(length), "max_new_tokens": 4}
    assert 0 <= tandem.evaluate(**keys)["eval/sampled"] <= 1.25


@pytest.mark.parametrize(
    ("command", "keys", "overrides"),
    [
        ("train", {"steps": 3, "learning_rate": 0.1}, ["run.steps=3", "train.learning_rate=0.1"]),
        ("sft", {"steps": 3, "learning_rate": 0.1}, ["sft.steps=3", "sft.learning_rate=0.1"]),
        ("rm", {"data": "a.jsonl"}, ['preference.train="a.jsonl"']),
        ("train", {"rl": {"group_size": 2}, "rl.seed": 1}, ["rl.group_size=2", "rl.seed=1"]),
        ("train", {"env": "guess", "path": np.int64(1)}, ['env.name="guess"', "model.path=1"]),
        ("distill", {"data": ["a", "b"], "teacher": "t"}, None),
    ],
)
def test_a_keyword_is_a_key(command, keys, overrides, tmp_path):
    expected = ['data.train=["a", "b"]', 'distill.teacher="t"'] if overrides is None else overrides
    assert overrides_of(values_of(command, keys), tmp_path) == expected


@pytest.mark.parametrize(
    ("command", "keys", "error"),
    [
        *[(c, {k: 2}, f"`tandem {c}` reads no key '{k}'") for c, k in UNREAD],
        ("train", {"workers": 2}, r"rollout\.workers, reward\.workers"),
        ("train", {"steps": 2, "run": {"steps": 3}}, r"two values\n.*run\.steps"),
        ("train", {"rl": 3}, "this key is a section"),
    ],
)
def test_a_mistaken_keyword_is_an_error(command, keys, error):
    with pytest.raises(tandem.UserError, match=error):
        values_of(command, keys)


def test_rows_of_any_kind_are_the_same_file(tmp_path):
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    kinds = [ROWS, iter(ROWS), pandas.DataFrame(ROWS), datasets.Dataset.from_list(ROWS)]
    assert len({source(rows, "data.train", tmp_path) for rows in kinds}) == 1
    assert len(list(tmp_path.iterdir())) == 1
    missing = source(pandas.DataFrame({"answer": [float("nan"), "a"]}), "x", tmp_path)
    assert Path(missing).read_text() == '{"answer": null}\n{"answer": "a"}\n'
    bad = {"eval.data": [{"prompt": object()}], "data.train": None, "rl.k": None}
    for key, value in bad.items():
        with pytest.raises(tandem.UserError, match=key):
            overrides_of({key: value}, tmp_path)


def test_functions_and_classes_are_read_by_another_process(tmp_path):
    class Shop(Env):
        pass

    spec, attempt = named(in_main(length), tmp_path), SimpleNamespace(text="7")
    assert spec.endswith(".pkl:length")
    assert load(spec, {})(Problem(uid="a", messages=(), answer="7"), attempt)[0] == 0.26
    assert issubclass(load_user_object(named(Shop, tmp_path), key="env.name"), Env)
    assert named(source, tmp_path) == "tandem.api.given:source"
    assert named(lambda problem, completion: 1.0, tmp_path).endswith(":function")
    with pytest.raises(tandem.UserError, match="another process"):
        named(in_main(partial(length, threading.Lock())), tmp_path)


SCRIPT = """import dataclasses, enum, pathlib, tandem.api.given as given
WORDS = {"yes", "no", "none", "perhaps"}
Kind = enum.Enum("Kind", ["A"])
@dataclasses.dataclass
class Grader:
    words: dict
    kind: Kind
    def __call__(self, p, c):
        return c in {"x", "y", "z"} or c in WORDS & self.words["a"]
print(given.named(Grader({"a": frozenset(WORDS)}, Kind.A), pathlib.Path(".")))"""


def test_the_same_code_is_the_same_file_in_every_process(tmp_path):
    outputs = set()
    for number, first in enumerate(["", "# a line before\n"]):
        own = {"PYTHONHASHSEED": str(number), "PYTHONPATH": os.pathsep.join(sys.path)}
        how = {"cwd": tmp_path, "env": os.environ | own, "text": True, "check": True}
        (script := tmp_path / f"{number}.py").write_text(first + SCRIPT)
        outputs.add(subprocess.run([sys.executable, script], capture_output=True, **how).stdout)
    [name] = outputs
    assert load_user_object(str(tmp_path / name.strip()), key="reward.function")(None, "none")


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sizes, *rest = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = {"__name__": "__main__"}
    exec(sizes, names)
    small = dict.fromkeys(("PROBLEMS", "HELD_OUT", "STEPS", "PROMPTS", "GROUP"), 2)
    small |= {"CHATS": 32, "WARM_STEPS": 1}
    assert small.keys() == names.keys() - {"FOLDER", "__name__", "__builtins__"}
    names |= small
    for cell in rest:
        exec(cell, names)
    assert len(names["rewards"]) == 2 and len(names["page"].split("<br>")) == 2
    assert names["after"].items() <= names["table"][-1].items()
