"""Sections "vllm" and "smollm2" of results/cluster.md: the demo and SmolLM2 with vLLM's rollouts, each
with a kill and a resume.

The demo's data and warm model are made as `make demo` makes them. SmolLM2 takes part if
`make smollm2-model` has made its directory.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from cluster_page import ROOT, Row

from tandem.plugins.start import demo
from tandem.run_folder.metrics import read_metrics
from tandem.runtime.disk import file_hash

sys.path.insert(0, str(ROOT / "examples"))
import smollm2

FOLDER = ROOT / "runs" / "cluster" / "vllm"
VLLM = ["rollout.engine=vllm", "rollout.workers=1", "rl.correction=tis"]
STEPS = 30  # of the demo, more than its own 10
KILLED_AT = 5  # between the journal of this step and its update
LIMIT_S = 7200.0
SMOLLM2_STEPS = 10  # a third of its recipe's


def run() -> list[Row]:
    """Run the demo."""
    folder = FOLDER / "demo"
    shutil.rmtree(folder / "train", ignore_errors=True)  # a warm model stays
    demo.make_inputs(folder, 0)
    warm = [*demo.settings(folder, 0, "sft", model=folder / "model")]
    _finish(["sft", "recipes/demo.toml", *warm])
    command = ["train", "recipes/demo.toml"]
    command += demo.settings(
        folder, 0, "train", model=folder / "sft" / "hf" / _last(folder / "sft")
    )
    command += [*VLLM, "eval.every=0", f"run.steps={STEPS}"]
    run = folder / "train"
    killed = _killed_and_resumed(command, run)
    replayed = subprocess.run(
        [sys.executable, "-m", "tandem", "replay", str(run), "--step", str(KILLED_AT)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return [
        *_learned("demo, 0.4M parameters, a tied head", run, "eval/sampled"),
        killed,
        (
            f"`tandem replay` of step {KILLED_AT}",
            replayed.stdout.strip().split(":")[0]
            + "; "
            + "; ".join(line for line in replayed.stdout.splitlines() if "log-probs of" in line),
            "metrics, weights and checkpoint bit by bit",
        ),
    ]


def run_smollm2() -> list[Row]:
    """Run SmolLM2."""
    folder, model = FOLDER / "smollm2", ROOT / smollm2.FOLDER / "model"
    if not model.exists():
        return [("SmolLM2-135M", "not run", "`make smollm2-model` makes its directory")]
    shutil.rmtree(folder, ignore_errors=True)
    smollm2.make_data(folder / "data")
    data = [f"{key}={folder / 'data' / name}" for key, name in _FILES.items()]
    command = ["train", "recipes/smollm2.toml", f"model.path={model}", *data, *VLLM]
    command += [f"run.folder={folder / 'train'}", f"run.steps={SMOLLM2_STEPS}", "run.save_every=2"]
    command += ["eval.every=0", "eval.greedy=false", "train.tokens_per_microbatch=512"]
    killed = _killed_and_resumed(command, folder / "train")
    rows = _learned(f"SmolLM2-135M, {SMOLLM2_STEPS} steps", folder / "train", "eval/sampled")
    return [*rows, killed]


_FILES = {"data.train": "train.jsonl", "eval.data": "test.jsonl"}


def _killed_and_resumed(command: Sequence[str], run: Path) -> Row:
    """Kill a run after the journal of step KILLED_AT, and have the same command end it."""
    journal = run / "episodes" / f"train_step_{KILLED_AT:06d}.parquet"
    _kill(command, lambda: journal.exists())
    done = [row["step"] for row in read_metrics(run)]
    before = file_hash(journal)
    seconds = _finish(command)
    again = file_hash(journal) == before
    return (
        f"killed (SIGKILL) after the journal of step {KILLED_AT}, started again",
        f"ended; {max(done, default=0)} steps had metrics; the step's episodes "
        + ("are the same file" if again else "were sampled AGAIN"),
        f"the same command, {seconds:.0f} s",
    )


def _learned(what: str, run: Path, key: str) -> list[Row]:
    """Return rows of the reward, the gap and the times of a finished run."""
    rows, times = read_metrics(run), read_metrics(run, "timings.jsonl")
    rewards = [row[key] for row in rows if key in row]
    steps = [row for row in rows if "logprob_gap_mean" in row]
    means = [row["logprob_gap_mean"] for row in steps]
    largest = max(row["logprob_gap"] for row in steps)
    parts = {
        name: float(np.median([row[name] for row in times if name in row]))
        for name in ("rollout_s", "learn_s", "sync_s")
    }
    return [
        (
            f"{what}: held-out reward, sampled",
            f"{rewards[0]:.3f} before, {rewards[-1]:.3f} after {len(steps)} steps",
            "the trainer's own engine, evaluation before and after",
        ),
        (
            f"{what}: gap to the trainer's log-probs",
            f"{np.median(means):.1e} nats in the mean, {max(means):.1e} in the worst step; "
            f"{largest:.1e} for the worst token",
            "every token of every step, after the weights of that step came",
        ),
        (
            f"{what}: seconds of a step",
            ", ".join(f"{name.removesuffix('_s')} {value:.2f}" for name, value in parts.items()),
            "medians of timings.jsonl",
        ),
    ]


def _last(run: Path) -> str:
    return max(path.name for path in (run / "hf").iterdir())


def _tandem(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tandem", *arguments], cwd=ROOT)


def _finish(arguments: Sequence[str]) -> float:
    """Run a command to its end; return its seconds."""
    started = time.perf_counter()
    process = _tandem(arguments)
    try:
        assert process.wait(LIMIT_S) == 0, f"tandem {' '.join(arguments)} has failed"
    finally:
        process.kill()
    return time.perf_counter() - started


def _kill(arguments: Sequence[str], when: Callable[[], bool]) -> None:
    """Run a command and kill it, as soon as it is time."""
    process, ends = _tandem(arguments), time.monotonic() + LIMIT_S
    try:
        while not when() and process.poll() is None and time.monotonic() < ends:
            time.sleep(0.002)
        assert process.poll() is None, f"tandem {' '.join(arguments)} has ended by itself"
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        process.kill()


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
