"""Sections of `make gpu` that prove: the kernels' tests, parity, resumed runs, and that it learns."""

import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from gpu_bench import Bench
from learning import rise

from tests.support.parity import parity_of
from tests.support.runs import Forks, fingerprint, prepare

ROOT = Path(__file__).parent.parent
Figures = dict[str, float | int | str | None]


def kernels(bench: Bench) -> Figures:
    """Figures of pytest; a trial only collects the tests, as Triton's interpreter takes minutes."""
    command = [sys.executable, "-m", "pytest", "-n0", "tests/gpu", *["--collect-only"] * bench.tiny]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return outcomes(done.stdout)


def outcomes(output: str) -> Figures:
    """Counts of the last line that pytest prints. Example: "== 2 failed, 40 passed in 61.02s ==" """
    last = output.strip().rpartition("\n")[2]
    found = {kind.rstrip("s"): int(count) for count, kind in re.findall(r"(\d+) ([a-z]+)", last)}
    return {
        "passed": found.get("passed", 0),
        "failed": found.get("failed", 0) + found.get("error", 0),
        "skipped": found.get("skipped", 0),
    }


def parity(bench: Bench, name: str, dtype: str) -> Figures:
    schedules = bench.size(100, 1)
    tokens, gap = parity_of(name, schedules, getattr(torch, dtype), bench.place.device)
    return {"schedules": schedules, "sampled tokens": tokens, "largest log-prob gap": gap}


def resume(bench: Bench, kind: str) -> Figures:
    """Runs killed with SIGKILL once metrics.jsonl has 1, 2, ... rows, and started again."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        command = [*prepare(folder, bench.size(6, 4), kind), *placed(bench)]
        forks().run(command, folder / "whole")
        expected, rows, hits, equal = fingerprint(folder / "whole"), bench.size(5, 1), 0, 0
        for row in range(1, rows + 1):
            killed = folder / str(row)
            hits += forks().run(command, killed, kill_at_row=row) != 0
            forks().run(command, killed)
            equal += fingerprint(killed) == expected
    return {"killed": hits, "resumed": rows, "byte-equal": equal}


def learning(bench: Bench, seed: int) -> Figures:
    """Rise of the held-out reward in the demo; in a trial, of a run of one step."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if bench.tiny:
            forks().run([*prepare(folder, 1), *placed(bench)], folder / "train")
        else:
            demo = [sys.executable, "-m", "tandem", "demo", "--folder", place, "--seed", str(seed)]
            subprocess.run(demo, check=True, cwd=ROOT)
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
