"""The depth of a training step and the number of functions that its thread runs: `tandem train` in
a process of its own, observed. Episodes of the single turn are among them. Functions without a name
(lambdas, comprehensions) do not count, nor do those that `dataclasses` writes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.runs import prepare

ROOT = Path(__file__).parents[1]
PROGRAM = """
import functools, json, sys
import tandem.engine.engine as engine, tandem.jobs.rl as rl, tandem.rl.losses as losses
from tandem.cli.main import run

def name(frame):
    return f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"

def ours(frame):
    return frame.f_globals.get("__name__", "").startswith("tandem.")

stacks, functions = {}, set()

def observed(function, key):
    @functools.wraps(function)
    def call(*arguments, **options):
        frame, names = sys._getframe(1), [function.__qualname__]
        while frame is not None:
            names += [name(frame)] * ours(frame)
            frame = frame.f_back
        stacks[key] = max(stacks.get(key, []), names[::-1], key=len)
        return function(*arguments, **options)
    return call

def profile(frame, event, _):
    code = frame.f_code
    written = not code.co_name.startswith("<") and not code.co_qualname.startswith("__create_fn__")
    if event == "call" and ours(frame) and written:
        functions.add(name(frame))

def step(stages, number):
    sys.setprofile(profile if number == 1 else None)  # then nothing is done for the first time
    try:
        return train_step(stages, number)
    finally:
        sys.setprofile(None)

train_step, rl.train_step = rl.train_step, step
engine.sample, losses.ppo_clip = observed(engine.sample, "token"), observed(losses.ppo_clip, "loss")
try:
    run()
finally:
    print("\\n" + json.dumps({"stacks": stacks, "functions": sorted(functions)}))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("depth")
    python, _, _, *arguments = prepare(folder, steps=2)
    small = ["eval.every=0", "rl.prompts_per_step=2"]
    command = [python, "-c", PROGRAM, *arguments, *small, f"run.folder={folder}/run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    output = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert output.returncode == 0, output.stdout + output.stderr
    return json.loads(output.stdout.splitlines()[-1])


@pytest.mark.parametrize("key", ["loss", "token"])
def test_step_reaches_it_at_most_thirteen_frames_below_the_command(seen, key):
    stack = seen["stacks"][key]
    assert len(stack) <= 14 and stack[0] == "tandem.cli.main.run", stack


def test_one_step_runs_at_most_369_functions(seen):
    assert 100 < len(seen["functions"]) <= 369, len(seen["functions"])
