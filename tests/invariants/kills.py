"""Start a small GRPO run in a process of its own, kill it at given moments, and compare what is left byte by byte."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tandem.data.algebra import write_dataset
from tandem.model.tiny import make_tiny

RECIPE = """
[run]
steps = {steps}
save_every = 3
threads = 1
[rollout]
max_new_tokens = 12
[rl]
prompts_per_step = 8
group_size = 4
advantage = "grpo_no_std"
minibatches = 2
[train]
learning_rate = 1e-3
[sft]
steps = {steps}
batch_size = 16
[eval]
samples = 2
every = 4
"""


def prepare(folder: Path, steps: int = 12, command: str = "train") -> list[str]:
    """Data, a tiny model and a recipe; returns the command, which lacks only run.folder."""
    write_dataset(folder / "data", "easy", num_train=48, num_test=8, num_warm=64, seed=0, careless=0.0)
    make_tiny(folder / "model", hidden=32, layers=2, intermediate=64)
    (folder / "recipe.toml").write_text(RECIPE.format(steps=steps))
    inputs = {
        "data.train": "data/train.jsonl",
        "sft.train": "data/warm.jsonl",
        "eval.data": "data/test.jsonl",
        "model.path": "model",
    }
    overrides = [f"{key}={folder / place}" for key, place in inputs.items()]
    return [sys.executable, "-m", "tandem", command, str(folder / "recipe.toml"), *overrides]


def run(command: list[str], folder: Path, kill_after_s: float | None = None) -> tuple[int, float]:
    """(exit code, seconds); with kill_after_s the whole process group is killed with SIGKILL at that moment."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, f"run.folder={folder}"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=kill_after_s or 300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return -signal.SIGKILL, time.perf_counter() - start
    assert process.returncode == 0, output.decode()
    return 0, time.perf_counter() - start


def fingerprint(folder: Path) -> dict[str, str]:
    """Hashes of all that must not depend on kills: weights, optimizer, metrics, episodes, the exported model."""
    steps = sorted((folder / "checkpoints").glob("step_*"))
    files = [*steps[-1].glob("*.safetensors"), folder / "metrics.jsonl", *(folder / "episodes").glob("*.parquet")]
    files += (folder / "hf").glob("step_*/*.safetensors")
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(files)}


def interrupted(command: list[str], folder: Path, moments: list[float]) -> int:
    """Kill the run at each moment (seconds after a start), then let it finish; returns how many kills hit a live run."""
    hits = sum(run(command, folder, moment)[0] != 0 for moment in moments)
    run(command, folder)
    return hits
