"""Small runs of every command that trains, killed with SIGKILL and started again; what is left,
compared byte by byte.

A run is a process of its own (`run`, at given moments), or a fork of a process that has imported
Tandem and nothing else (`Forks`, at given steps), which saves the seconds of the import and so
kills where the work is.
"""

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from multiprocessing.context import ForkServerProcess as Fork
from pathlib import Path
from typing import Any

from tandem.model.tiny import make_tiny
from tandem.plugins.tasks import algebra, squares
from tandem.plugins.vision.tiny_images import make_tiny_images
from tandem.runtime.disk import write_rows
from tests.support.architectures import ARCHITECTURES, INEXACT, save_architecture
from tests.support.datasets import write_algebra
from tests.support.image_models import save_image_model
from tests.support.meshes import CONTEXT, PRELOAD
from tests.support.part_models import PARTS, save_whole
from tests.support.thinking import save_thinking

RECIPE = """
[run]
steps = {steps}
save_every = 3
[rollout]
max_new_tokens = 12
[rl]
prompts_per_step = 8
group_size = 4
[train]
learning_rate = 1e-3
tokens_per_microbatch = 1024
[sft]
steps = {steps}
batch_size = 16
[preference]
steps = {steps}
batch_size = 8
learning_rate = 1e-3
[eval]
samples = 2
every = 4
"""
# A random model never finds an answer: half of its texts are rewarded for nothing, so that there is
# something to learn.
REWARD = """
def score(problem, completion):
    return float(sum(map(ord, completion)) % 2)
"""
# Answers each turn by what it heard, after a time that nobody foresees; some texts are too much for
# it.
ENVIRONMENT = """
import os, time
from tandem.types import Env, Observation

class Chat(Env):
    turns = 0

    def step(self, text):
        self.turns += 1
        if sum(map(ord, text)) % 11 == 3:
            raise ValueError("a tool that failed")
        time.sleep(os.urandom(1)[0] / 20_000)
        done = self.turns == 3
        messages = [{"role": "user", "content": f"{text[:8]}?"}]
        reward, penalty = float(sum(map(ord, text)) % 2), 0.1 * (len(text) % 2)
        return Observation(messages=messages, done=done, reward=reward, penalty=penalty)
"""
_PR_SET_PDEATHSIG = 1
IMAGES = 24  # problems, each with an image of its own
IMAGE_MODELS = ("qwen3_vl", "smolvlm")
END_S = 300.0  # for a run to end, on a busy machine
TURNS = [
    "env.name=FOLDER/env.py:Chat",
    "reward.function=env",
    'rollout.stop=["a", "e", "1", "x", "Z"]',
]
PPO = ["train", "rl.algorithm=ppo", "critic.warmup_steps=1"]
LORA = ["lora.rank=4", "rl.kl_coef=0.05"]
AHEAD = ["rl.correction=tis", "rollout.staleness=1", "rollout.workers=1"]
KINDS = {  # name: command and overrides
    "train": ["train", "rl.advantage=grpo_no_std", "rl.minibatches=2"],
    "sft": ["sft"],
    "dpo": ["dpo"],
    "rm": ["rm"],
    "distill": ["distill"],
    "dapo": ["train", "rl.algorithm=dapo"],
    "ema": ["train", "rl.algorithm=reinforce", "rl.group_size=2"],
    "ppo": [*PPO, "rl.epochs=2"],
    "dapo, curriculum": ["train", "rl.algorithm=dapo", "rl.curriculum=true"],
    "lora": ["train", *LORA],
    "multi-turn": ["train", "rl.algorithm=dapo", *TURNS],
    "rendered turns": [*PPO, "rollout.history=template", "model.path=FOLDER/thinking", *TURNS],
    "ppo, lora": [*PPO, *LORA],
}
# transformers' own forward pass
KINDS["gemma2"] = [*KINDS["train"], "model.path=FOLDER/gemma2", "rl.kl_coef=0.05"]
for name in ("lfm2", "gemma4_text"):
    KINDS[name] = [*KINDS["train"], f"model.path=FOLDER/{name}"]
# the language model of one that also reads images
KINDS["gemma3"] = [*KINDS["train"], "model.path=FOLDER/gemma3"]
# not exact: state and cache are transformers' own
KINDS["mamba2"] = [*KINDS["train"], "model.path=FOLDER/mamba2", "rl.correction=tis"]
KINDS["images"] = [
    *KINDS["train"],
    "model.path=FOLDER/images",
    "data.train=FOLDER/squares.jsonl",
    "eval.data=FOLDER/squares.jsonl",
    "rl.correction=tis",
]
# of other makes: a tower that also feeds layers (Qwen3-VL), an image in several tiles (SmolVLM)
for make in IMAGE_MODELS:
    KINDS[make] = [*KINDS["images"], f"model.path=FOLDER/{make}"]
KINDS["bfloat16"] = [*KINDS["ppo"], "rl.kl_coef=0.05", "model.dtype=bfloat16"]
KINDS["8-bit moments"] = [*KINDS["bfloat16"], "train.optimizer=adamw_8bit"]
KINDS |= {
    "one-step-off": [*KINDS["train"], *AHEAD],
    "images, one step off": [*KINDS["images"], *AHEAD],
    "partial": [*KINDS["train"], *AHEAD, "rollout.token_budget=5"],
    "three at once": ["train", *TURNS, *AHEAD, "rollout.staleness=2", "rollout.workers=2"],
    "multi-turn, two steps off": [
        *KINDS["multi-turn"],
        *AHEAD,
        "rollout.staleness=2",
        "rollout.workers=0",
    ],
    "dapo, bfloat16, lora, two sources, one step off": [
        *KINDS["lora"],
        "rl.algorithm=dapo",
        "model.dtype=bfloat16",
        'data.train=["FOLDER/data/train.jsonl", "FOLDER/data/more.jsonl"]',
        "data.weights=[3, 1]",
        *AHEAD,
    ],
    "rendered turns, partial": [
        *KINDS["rendered turns"],
        "rl.algorithm=gspo",
        "critic.warmup_steps=0",
        *AHEAD,
        "rollout.token_budget=5",
    ],
    "multi-turn, lora, partial": [
        *KINDS["multi-turn"],
        "lora.rank=4",
        *AHEAD,
        "rollout.token_budget=5",
    ],
}


def prepare(folder: Path, steps: int = 12, command: str = "train") -> list[str]:
    """Data, tiny models and a recipe; command is one of KINDS. Returns the command line, which
    lacks only run.folder."""
    write_algebra(folder / "data", num_train=48, num_test=8, num_warm=64)
    rows = algebra.rows("train", 68, seed=0, difficulty=1)
    write_rows(folder / "data/more.jsonl", islice(rows, 48, None))  # behind those of train.jsonl
    make_tiny(folder / "model", hidden=32, layers=2, intermediate=64)
    make_tiny(folder / "teacher", hidden=32, layers=2, intermediate=64, seed=1)
    if "images" in str(KINDS[command]):
        make_tiny_images(folder / "images", hidden=32, heads=4, layers=2, intermediate=64)
        write_rows(folder / "squares.jsonl", squares.TASK.rows("train", IMAGES, 0, 1))
    if "thinking" in str(KINDS[command]):
        save_thinking(folder / "thinking")
    if command in IMAGE_MODELS:
        save_image_model(command, folder / command)
    if command in (*ARCHITECTURES, *INEXACT):
        save_architecture(command, folder / command)
    if command in PARTS:
        save_whole(command, folder / command)
    (folder / "pairs.jsonl").write_text("".join(f"{pair(number)}\n" for number in range(24)))
    (folder / "reward.py").write_text(REWARD)
    (folder / "env.py").write_text(ENVIRONMENT)
    (folder / "recipe.toml").write_text(RECIPE.format(steps=steps))
    inputs = {
        "data.train": "data/train.jsonl",
        "sft.train": "data/warm.jsonl",
        "preference.train": "pairs.jsonl",
        "eval.data": "data/test.jsonl",
        "model.path": "model",
        "distill.teacher": "teacher",
        "reward.function": "reward.py:score",
    }
    name, *changes = KINDS[command]
    overrides = [f"{key}={folder / place}" for key, place in inputs.items()]
    changes = [change.replace("FOLDER", str(folder)) for change in changes]
    return [sys.executable, "-m", "tandem", name, str(folder / "recipe.toml"), *overrides, *changes]


def pair(number: int) -> str:
    """A row of preference.train; every third rejected answer is longer."""
    answers = {
        "chosen": f"Answer: {number}",
        "rejected": f"Answer: {number + 1}" + " or so" * (number % 3 == 0),
    }
    return json.dumps({"prompt": f"What is {number} + 0?", **answers})


def run(
    command: list[str],
    folder: Path,
    kill_after_s: float | None = None,
    *,
    place: Sequence[str] = (),
) -> tuple[int, float]:
    """(exit code, seconds); with kill_after_s the whole process group is killed with SIGKILL at
    that moment.

    place: what stands before the command line, e.g. "taskset", "-c", "0".
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [*place, *command, f"run.folder={folder}"],
        env={**unpinned(), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=kill_after_s or END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return -signal.SIGKILL, time.perf_counter() - start
    assert process.returncode == 0, output.decode()
    return 0, time.perf_counter() - start


def unpinned() -> dict[str, str]:
    """The environment without a thread count, as a user has it."""
    return {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}


class Forks:
    """Runs commands in forks of one process that has imported Tandem and computed nothing."""

    def __init__(self) -> None:
        CONTEXT.set_forkserver_preload(PRELOAD)

    def run(self, command: list[str], folder: Path, kill_at_row: int | None = None) -> int:
        """The exit code; with kill_at_row it is killed with SIGKILL once metrics.jsonl has that
        many rows and a checkpoint is there, which is saved beside the steps."""
        process = self.start(command, folder)
        metrics, saved = folder / "metrics.jsonl", folder / "checkpoints"
        try:
            while kill_at_row is not None and process.is_alive():
                rows = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
                if rows >= kill_at_row and any(saved.glob("step_*")):
                    break
                time.sleep(0.002)
            if kill_at_row is None:
                process.join(END_S)
        finally:  # also of a run that takes too long
            process.kill()
        process.join(END_S)
        code = process.exitcode
        assert code in (0, -signal.SIGKILL), output(folder)
        return code

    def start(
        self, command: list[str], folder: Path, first: Callable[..., None] | None = None, *args: Any
    ) -> Fork:
        """Under way, after first(*args) in the new process; join it."""
        process = CONTEXT.Process(target=_forked, args=(command, folder, first, args))
        process.start()
        return process


def end_well(run: Fork, folder: Path, code: int = 0) -> None:
    """Wait for a run to end with an exit code; one that hangs is killed."""
    run.join(END_S)
    run.kill()  # of a run that has ended nothing is left to kill
    run.join()
    assert run.exitcode == code, output(folder)


def output(folder: Path) -> str:
    """Return what the runs of a fork in this folder have printed."""
    return (folder.parent / f"{folder.name}.out").read_text()


def end_with_parent() -> None:
    """On Linux; the parent of a fork is the server, which ends with whoever has the Forks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _forked(
    command: list[str], folder: Path, first: Callable[..., None] | None, args: tuple[Any, ...]
) -> None:
    """The command line as `tandem` takes it, what it prints in a file beside the run folder."""
    end_with_parent()
    if first is not None:
        first(*args)
    from tandem.cli.main import run as entry

    with (folder.parent / f"{folder.name}.out").open("ab", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.argv = ["tandem", *command[3:], f"run.folder={folder}"]
    entry()


def fingerprint(folder: Path) -> dict[str, str]:
    """Hashes of all that must not depend on kills: weights, optimizer, metrics, ledger, episodes,
    the exported model."""
    steps = sorted((folder / "checkpoints").glob("step_*"))
    told = [folder / "metrics.jsonl", folder / "ledger.jsonl"]
    files = [*steps[-1].glob("*.safetensors"), *told, *(folder / "episodes").glob("*.parquet")]
    files += (folder / "hf").glob("step_*/*.safetensors")
    return {
        str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(files)
    }
