"""Run folders made by hand and the server of `tandem view` over them, for tests and benchmarks."""

import io
import json
import os
from functools import partial
from zlib import crc32

import numpy as np
from PIL import Image

from tandem.config.recipe import to_toml
from tandem.config.schema import Config
from tandem.plugins.view.app import make_server
from tandem.run_folder.episode_files import write_episodes
from tandem.runtime.image_tokens import name_of
from tandem.types import Group, Problem
from tests.support.attempts import attempt
from tests.support.listening import listening


def keep_image(folder, size=(64, 32)):
    """Put a picture into a run's folder; return its name."""
    file = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(file, "PNG")
    name = name_of(file.getvalue())
    (folder / "images").mkdir(exist_ok=True)
    (folder / "images" / name).write_bytes(file.getvalue())
    return name


def viewing(root, token=""):
    """The URL of a server over a folder of runs; it is stopped on the way out."""
    return listening(partial(make_server, root, token))


def make_run(folder, steps=0, command="train", **config):
    """A run folder without episodes; add_step adds a step."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(Config(**config)))
    about = {"command": command, "created": "2026-01-31T12:00:00Z", "directory": os.getcwd()}
    (folder / "run.json").write_text(json.dumps(about))
    status = {"time": "2026-01-31T12:00:00Z", "step": 0, "steps": steps, "processes": []}
    (folder / "status.json").write_text(json.dumps(status))
    return folder


def add_step(folder, step, groups=(), kind="train", **numbers):
    """Write the episodes of a step, then its rows."""
    if groups:
        write_episodes(folder / "episodes", step, groups, kind)
    times = {name: numbers.pop(name) for name in list(numbers) if name.endswith("_s")}
    for name, row in (("timings", times), ("metrics", numbers)):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **row}) + "\n")


def group(uid, texts, rewards, *, prompt="What is 3 + 4?", outcome="train", version=0, **fields):
    """A group whose attempts said these texts; every character but the prompt's is a token."""
    problem = Problem(uid=uid, messages=({"role": "user", "content": prompt},), answer="7")
    attempts = tuple(
        _attempt(uid, number, prompt, text, reward, version, fields)
        for number, (text, reward) in enumerate(zip(texts, rewards, strict=True))
    )
    return Group(problem=problem, episodes=attempts, outcome=outcome)


def _attempt(uid, number, prompt, text, reward, version, fields):
    read, codes = 4, [ord(c) % 90 for c in text] or [1]
    size = read + len(codes)
    logprobs = np.where(np.arange(size) >= read, -0.01 * (np.arange(size) % 300), 0)
    own = {
        "engine_logprobs": logprobs.astype(np.float32),
        "messages": ({"role": "assistant", "content": text},),
        "key": (1 << 63) + crc32(f"{uid} {number}".encode()),
        "reward": reward,
        "reward_parts": {"score": reward},
    }
    return attempt(uid, number, [5] * read + codes, read, version, **own | fields)
