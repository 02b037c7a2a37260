"""Small finished runs, each made once for all tests that read it, and copies of them to damage."""

import atexit
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from tandem.cli.train import train
from tandem.config.recipe import load_config
from tandem.run_folder.episode_files import episode_file, read_groups, read_note, write_episodes
from tests.support.runs import KINDS, prepare

STEPS = 4  # checkpoints after 3 and 4
SMALLER = ["rl.prompts_per_step=4", "eval.samples=1", "eval.greedy=false", "eval.every=0"]
PARTIAL = "partial rollouts, a step ahead"
NARROW = ["rl.clip_low=1e-4", "rl.clip_high=1e-4"]  # so that tokens of older weights are clipped
KINDS["dapo, narrow"] = [*KINDS["dapo"], *NARROW, "run.save_every=1", "run.keep_checkpoints=9"]
KINDS[PARTIAL] = [
    "train",
    "rl.algorithm=dapo",
    "rollout.staleness=1",
    "rollout.token_budget=3",
    "rl.correction=tis",
]


@cache
def _place():
    place = tempfile.mkdtemp(prefix="past-runs-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return Path(place)


@cache
def past_run(kind):
    """The folder of a run of one of KINDS. Nobody may change it."""
    folder = _place() / f"{kind} {len(list(_place().iterdir()))}"
    folder.mkdir()
    _, _, _, command, recipe, *overrides = prepare(folder, STEPS, kind)
    config = load_config(recipe, [*overrides, *SMALLER, f"run.folder={folder / 'run'}"])
    train(command, config, folder / "run")
    return folder / "run"


def copy_of(run, folder):
    return Path(shutil.copytree(run, folder / "copy"))


def rewrite(run, step, change):
    """Let change(row, place, episode) make another of every episode in the journal file of a
    step."""
    path = episode_file(run / "episodes", step)
    groups = [
        replace(
            group, episodes=tuple(change(row, place, e) for place, e in enumerate(group.episodes))
        )
        for row, group in enumerate(read_groups(path))
    ]
    write_episodes(run / "episodes", step, groups, note=read_note(path))


def change_first(run, step, **changes):
    """Change fields of the first episode in the journal file of a step."""
    rewrite(run, step, lambda row, place, e: replace(e, **changes) if (row, place) == (0, 0) else e)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
