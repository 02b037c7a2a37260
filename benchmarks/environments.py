"""Are turns and tools learned? The guessing game and the calculator task on three seeds each, from
a tiny model.

    python benchmarks/environments.py [guess] [calculator]     default: both; rewrites results/environments.json

Reward is of held-out problems, sampled at temperature 1, before and after `tandem train`; `gap` is
the largest difference between the log-probs of engine and trainer in any turn of the run.
"""

import json
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import machine

from tandem.run_folder.metrics import read_metrics

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "environments"
RESULTS = ROOT / "results" / "environments.json"
TASKS = ("guess", "calculator")
SEEDS = range(3)


def main() -> int:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for task in sys.argv[1:] or TASKS:
        results[task] = [learn(task, seed) for seed in SEEDS]
        results |= {"machine": machine.describe(), "date": str(date.today())}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def learn(task: str, seed: int) -> dict:
    """The whole example in a fresh folder: data, model, warm start and training all seeded."""
    print(f"== {task}, seed {seed}", flush=True)
    folder = RUNS / f"{task}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    start = time.perf_counter()
    command = [
        sys.executable,
        "examples/tool_tasks.py",
        "--task",
        task,
        "--seed",
        str(seed),
        "--folder",
        str(folder),
    ]
    subprocess.run(command, check=True, cwd=ROOT)
    seconds = time.perf_counter() - start
    rows = read_metrics(folder / "train")
    gap = max(row["logprob_gap"] for row in rows if "logprob_gap" in row)
    report = json.loads((folder / "report.json").read_text())
    return {
        "seed": seed,
        **report,
        "steps": len([row for row in rows if "reward" in row]),
        "gap": gap,
        "seconds": seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
