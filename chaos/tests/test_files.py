"""Hostile and broken files: each ends in one error for its user, soon, and in little memory."""

import os
import resource
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from chaos.hostile import files
from tandem.config.recipe import load_config, to_toml
from tandem.config.schema import Config, Data
from tandem.data.problems import read_problems
from tandem.data.renderer import ChatRenderer, load_renderer
from tandem.model.config_file import check_model
from tandem.model.load import load_model
from tandem.model.tokenizer import load_tokenizer
from tandem.run_folder.checkpoint import (
    Contents,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from tandem.run_folder.folder import open_run
from tandem.run_folder.metrics import MetricsWriter
from tandem.runtime.errors import UserError
from tests.support.byte_models import make_model
from tests.support.tiny import stock_model, tiny_config
from tests.support.waiting import WAIT_S

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("no_collection")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A good model directory."""
    folder = tmp_path_factory.mktemp("good") / "model"
    stock_model(tiny_config("llama", vocab_size=320)).save_pretrained(folder)
    make_model(folder)
    return folder


def use(folder):
    check_model(str(folder))
    load_renderer(str(folder)).prompts([[{"role": "user", "content": "a"}]])
    load_model(str(folder))


def test_unchanged_model_directory_loads(model):
    use(model)


@pytest.mark.parametrize("name", files.MODELS)
def test_hostile_model_directory_is_one_error(name, model, tmp_path):
    folder = files.copied(model, tmp_path / "model", files.MODELS[name])
    with pytest.raises(UserError) as error:
        use(folder)
    assert str(folder) in str(error.value), "it does not say where"
    assert not list(tmp_path.rglob("ran")), "its code has run"


@pytest.fixture(scope="module")
def past_run(tmp_path_factory):
    """The folder of a run that was stopped after two steps."""
    folder = tmp_path_factory.mktemp("good") / "run"
    with (
        open_run(folder, Config(), fresh=False, command="train") as run,
        MetricsWriter(folder, 0) as metrics,
    ):
        run.note_machine("a processor", any_threads=True)
        for step in (1, 2):
            metrics.write(step, {"loss": 0.5}, {"seconds": 1.0}, {"weights": "x"})
            save(run, step)
    return folder


def save(run, step):
    tensors = {"policy": {"w": torch.zeros(4)}}
    config = to_toml(run.config)
    contents = Contents(step=step, tensors=tensors, state={"step": step}, config=config, keep=3)
    save_checkpoint(run.checkpoints, contents)


def resume(folder, report):
    """Resume the run as `tandem train` does, and make a step; returns the step resumed from."""
    with open_run(folder, Config(), fresh=False, command="train") as run:
        run.note_machine("a processor", any_threads=True)
        path = latest_checkpoint(run.checkpoints, report)
        _, state = load_checkpoint(path, verify=False)
        with MetricsWriter(folder, state["step"]) as metrics:
            metrics.write(state["step"] + 1, {"loss": 0.5}, {"seconds": 1.0})
        save(run, state["step"] + 1)
        return state["step"]


def write_neighbours(folder):
    """Write files next to the run folder, which no run may touch."""
    (folder / "precious").write_text("precious")
    (folder / "precious-folder").mkdir()
    (folder / "precious-folder" / "file").write_text("precious")


def check_untouched(folder):
    assert (folder / "precious").read_text() == "precious"
    assert (folder / "precious-folder" / "file").read_text() == "precious"
    assert not (folder / "nowhere").exists()


@pytest.mark.parametrize("name", files.RUNS)
def test_hostile_run_folder_is_one_error_and_loses_nothing(name, past_run, tmp_path):
    write_neighbours(tmp_path)
    folder = files.copied(past_run, tmp_path / "run", files.RUNS[name])
    with pytest.raises(UserError) as error:
        resume(folder, print)
    assert str(folder) in str(error.value), "it does not say where"
    check_untouched(tmp_path)
    if (folder / "checkpoints").is_dir():
        assert {"step_000001", "step_000002"} <= {
            path.name for path in (folder / "checkpoints").iterdir()
        }


@pytest.mark.parametrize("name", files.GOES_ON)
def test_run_resumes_from_the_newest_undamaged_checkpoint(name, past_run, tmp_path):
    write_neighbours(tmp_path)
    change, step = files.GOES_ON[name]
    reports = []
    assert resume(files.copied(past_run, tmp_path / "run", change), reports.append) == step
    assert (step == 1) <= any("step_000002 is damaged" in line for line in reports)
    check_untouched(tmp_path)


@pytest.mark.parametrize("name", files.RECIPES)
def test_hostile_recipe_is_one_error(name, tmp_path):
    toml, overrides = files.RECIPES[name]
    (tmp_path / "recipe.toml").write_bytes(toml if isinstance(toml, bytes) else toml.encode())
    with pytest.raises(UserError):
        config = load_config(tmp_path / "recipe.toml", list(overrides))
        with open_run(Path(config.run.folder), config, fresh=False, command="train"):
            pass


@pytest.mark.parametrize(
    "make", [files.folder_as("r.toml"), files.fifo_as("r.toml"), files.linked("r.toml", "r.toml")]
)
def test_recipe_that_is_not_a_file_is_one_error(make, tmp_path):
    make(tmp_path)
    with pytest.raises(UserError, match="recipe") as error:
        load_config(tmp_path / "r.toml", [])
    assert "r.toml" in error.value.where


def test_recipe_with_too_long_a_name_is_one_error():
    with pytest.raises(UserError, match="recipe"):
        load_config("a" * 5_000, [])


@pytest.mark.parametrize("name", files.DATA)
def test_hostile_data_are_one_error_in_little_memory(name, tmp_path):
    suffix, make, message = files.DATA[name]
    make(tmp_path / f"data{suffix}")
    with little_memory(), pytest.raises(UserError) as error:
        read_problems(str(tmp_path / f"data{suffix}"), Data(), key="data.train")
    assert message in str(error.value) and f"data{suffix}" in str(error.value)


@contextmanager
def little_memory():
    """Limit the process to 700 MiB more than it has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 700 * 2**20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# within the bounds of time and memory: what transformers renders, too
BOUNDED_TEMPLATES = {
    "indent",
    "indent by text",
    "a namespace in itself",
    "a namespace that is printed",
    "filters of filters",
    "a text searched from behind",
}


@pytest.mark.parametrize("name", files.TEMPLATES)
def test_hostile_chat_template_is_one_error_in_little_memory(name, model):
    tokenizer = load_tokenizer(str(model))
    began = time.monotonic()
    is_error = name not in BOUNDED_TEMPLATES
    expected = pytest.raises(UserError, match="the chat template") if is_error else nullcontext()
    with little_memory(), expected as error:
        ChatRenderer(tokenizer, "{% set m = 'a' %}" + files.TEMPLATES[name], {0}, "elsewhere")
    assert "MemoryError" not in str(error and error.value)
    assert time.monotonic() - began < 60


def tandem(*arguments, cwd, typed=""):
    """Run the command line; returns (exit code, what it writes to stderr)."""
    result = subprocess.run(
        [sys.executable, "-m", "tandem", *arguments],
        cwd=cwd,
        input=typed,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
    )
    return result.returncode, result.stderr


def check_one_error(code, errors):
    assert code == 2, errors
    assert errors.count("error: ") == 1 and "Traceback" not in errors


def test_code_of_a_model_directory_never_runs(model, tmp_path):
    folder = files.copied(model, tmp_path / "model", files.remote_code)
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    (tmp_path / "recipe.toml").write_text('reward = "answer"\n[data]\ntrain = "data.jsonl"\n')
    check_one_error(
        *tandem("train", "recipe.toml", f"model.path={folder}", cwd=tmp_path, typed="y\n" * 20)
    )
    check_one_error(*tandem("serve", str(folder), cwd=tmp_path, typed="y\n" * 20))
    assert not (tmp_path / "ran").exists()


def test_hostile_files_end_the_command_with_exit_code_2(model, tmp_path):
    (tmp_path / "data.jsonl").write_text(
        "".join(f'{{"prompt": "{i} + 1 =", "answer": "{i + 1}"}}\n' for i in range(8))
    )
    (tmp_path / "recipe.toml").write_text(
        f'reward = "answer"\n[model]\npath = "{model}"\n[data]\ntrain = "data.jsonl"\n'
        "[run]\nsteps = 1\n"
        "[rl]\nprompts_per_step = 2\ngroup_size = 2\n[rollout]\nmax_new_tokens = 4\n"
    )
    (tmp_path / "deep.toml").write_text("a = " + "[" * 5_000)
    (tmp_path / "reward.py").mkdir()
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "lock")
    files.DATA["a column twice in Parquet"][1](tmp_path / "data.parquet")
    check_one_error(*tandem("plan", "deep.toml", cwd=tmp_path))
    check_one_error(*tandem("train", "recipe.toml", "run.folder=/proc/nope", cwd=tmp_path))
    check_one_error(*tandem("train", "recipe.toml", "run.folder=run", cwd=tmp_path))
    check_one_error(*tandem("train", "recipe.toml", "reward=reward.py:score", cwd=tmp_path))
    check_one_error(*tandem("train", "recipe.toml", "data.train=data.parquet", cwd=tmp_path))
