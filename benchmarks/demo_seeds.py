"""`make learning`: the demo on five seeds (data, model, SFT and GRPO all seeded), each in a fresh folder.

Writes docs/learning.md: seed, held-out sampled reward before and after GRPO, seconds of the whole demo.
"""

import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import machine
import numpy as np

from tandem.metrics import read_metrics

ROOT = Path(__file__).parent.parent
SEEDS = range(5)
HEAD = (
    "Written by `make learning` (`benchmarks/demo_seeds.py`). Held-out reward sampled at temperature 1,",
    "64 problems x 4 samples, of the warm start and after 60 steps of GRPO; seconds are of the whole demo.",
)


def main() -> int:
    rows = []
    for seed in SEEDS:
        folder = ROOT / "runs" / "learning" / f"seed-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "examples/demo.py", "--folder", str(folder), "--seed", str(seed)], check=True, cwd=ROOT
        )
        metrics = read_metrics(folder / "train")
        evals = [row["eval/sampled"] for row in metrics if "eval/sampled" in row]
        gap = float(np.max([row["logprob_gap"] for row in metrics if "logprob_gap" in row]))
        rows.append((seed, evals[0], evals[-1], gap, time.perf_counter() - start))
    (ROOT / "docs" / "learning.md").write_text(table(rows))
    return 0


def table(rows: list[tuple[int, float, float, float, float]]) -> str:
    lines = ["# The demo on five seeds", "", *HEAD, "", f"Machine: {machine.describe()}; {date.today()}.", ""]
    lines += ["| seed | before | after | rise | largest log-prob gap | seconds |", "|---|---|---|---|---|---|"]
    lines += [f"| {s} | {b:.3f} | {a:.3f} | +{a - b:.3f} | {g} | {t:.0f} |" for s, b, a, g, t in rows]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
