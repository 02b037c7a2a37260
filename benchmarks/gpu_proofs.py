"""Sections of `make gpu` that prove: the kernels' tests, parity, resumed runs, and that it learns."""

import atexit
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gpu_bench import Bench
from learning import rise

from tests.support.parity import parity_of_model, random_model
from tests.support.runs import Forks, fingerprint, prepare

ROOT = Path(__file__).parent.parent
Figures = dict[str, float | int | str | None]


def kernels(bench: Bench) -> Figures:
    """Figures of pytest; a trial only collects the tests, as Triton's interpreter takes minutes.

    Compiling takes the time, so there are several processes; kernels for GPUs that are not here
    compile without one."""
    command = [sys.executable, "-m", "pytest", "-n8", "-rfE", "tests/gpu"]
    command += ["--ignore=tests/gpu/test_compiled_for_gpus.py"]
    if bench.tiny:
        command += ["-n0", "--collect-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return outcomes(done.stdout)


def outcomes(output: str) -> Figures:
    """Counts of the last line that pytest prints, as "== 2 failed, 40 passed in 61.02s ==", and
    the tests that failed."""
    last = output.strip().rpartition("\n")[2]
    names = re.findall(r"^(?:FAILED|ERROR) (?:\S*/)?(\S+)", output, re.MULTILINE)
    found = {kind.rstrip("s"): int(count) for count, kind in re.findall(r"(\d+) ([a-z]+)", last)}
    return {
        "passed": found.get("passed", 0),
        "failed": found.get("failed", 0) + found.get("error", 0),
        "skipped": found.get("skipped", 0),
        "which failed": ", ".join(names) or "none",
    }


def parity(bench: Bench, name: str, dtype: str) -> Figures:
    schedules = bench.size(100, 1)
    model = random_model(name, dtype=getattr(torch, dtype), device=bench.place.device)
    tokens, gap = parity_of_model(model, schedules)
    return {"schedules": schedules, "sampled tokens": tokens, "largest log-prob gap": gap}


def resume(bench: Bench, kind: str, row: int) -> Figures:
    """A run killed with SIGKILL once metrics.jsonl has that many rows, and started again."""
    folder, command, expected = whole_run(bench, kind)
    killed = folder / str(row)
    hit = forks().run(command, killed, kill_at_row=row) != 0
    forks().run(command, killed)
    return {"killed": int(hit), "resumed": 1, "byte-equal": int(fingerprint(killed) == expected)}


@cache
def whole_run(bench: Bench, kind: str) -> tuple[Path, list[str], dict[str, Any]]:
    """A folder of this process's, the command of a run there, and the fingerprint of one that was
    not killed."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [*prepare(folder, bench.size(6, 4), kind), *placed(bench)]
    forks().run(command, folder / "whole")
    return folder, command, fingerprint(folder / "whole")


def learning(bench: Bench, seed: int) -> Figures:
    """Rise of the held-out reward in the demo; in a trial, of a run of one step."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if bench.tiny:
            forks().run([*prepare(folder, 1), *placed(bench)], folder / "train")
        else:
            demo = [sys.executable, "-m", "tandem", "demo", "--folder", place, "--seed", str(seed)]
            subprocess.run([*demo, "run.steps=60", "eval.every=20"], check=True, cwd=ROOT)
        found = rise(folder / "train")
    return {
        "held-out reward before": found["before"],
        "after": found["after"],
        "rise": found["after"] - found["before"],
        "largest log-prob gap": found["gap"],
    }


def placed(bench: Bench) -> list[str]:
    return [f"model.device={bench.place.device}", f"model.dtype={bench.place.dtype_name}"]


@cache
def forks() -> Forks:
    """A process to fork from; it has no context of the GPU."""
    return Forks()
