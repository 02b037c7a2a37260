"""The part "ray" of benchmarks/cluster.py: the demo on a Ray cluster of two nodes against the same
run in one process.

    python benchmarks/cluster_ray.py
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tandem.plugins.start import demo  # noqa: E402

CLUSTER = ["cluster.nodes=2", "rollout.workers=2"]
RANKS = ["parallel.data=2", "run.threads=1"]
QUEUE = ["stream.kind=transfer_queue"]
LIMIT_S = 7200.0

Row = tuple[str, str, str]  # what, result, how


def run() -> list[Row]:
    """Run the demo in one process, then its GRPO again on two Ray nodes; and both with two trainer
    ranks, on Ray with TransferQueue."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _python(["-m", "tandem", "demo", "--folder", str(folder)])
        return [
            *_compared(folder, "one trainer rank", [], CLUSTER),
            *_compared(folder, "two trainer ranks, TransferQueue", RANKS, [*CLUSTER, *QUEUE]),
        ]


def _compared(folder: Path, name: str, common: list[str], cluster: list[str]) -> list[Row]:
    """Run the demo's GRPO here and on the cluster. Raises RuntimeError if the weights differ or the
    held-out reward does not rise."""
    warm = max((folder / "sft" / "hf").glob("step_*"))
    command = ["-m", "tandem", "train", "recipes/demo.toml"]
    command += [*demo.settings(folder, 0, "train", model=warm), "run.steps=60", *common]
    here, there = folder / f"here {name}", folder / f"on Ray {name}"
    here_s = _python([*command, f"run.folder={here}"])
    ray_s = _python([*command, f"run.folder={there}", *cluster])
    expected, _, _ = _end(here)
    found, before, after = _end(there)
    if found != expected:
        raise RuntimeError(f"on two nodes the weights are {found}, without Ray {expected}")
    if after <= before:
        raise RuntimeError(f"the held-out reward went from {before:.3f} to {after:.3f}")
    how = f"recipes/demo.toml, run.steps=60, {' '.join([*common, *cluster])}; {ray_s:.0f} s, Ray's start included"
    same = f"{found[:16]}, as without Ray ({here_s:.0f} s)"
    return [
        (f"the demo's GRPO on two Ray nodes, {name}: weights", same, how),
        ("its held-out reward", f"{before:.3f} -> {after:.3f}", "sampled, before and after"),
    ]


def _python(arguments: list[str]) -> float:
    """Run Python; return the seconds."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}")
    return time.perf_counter() - start


def _end(folder: Path) -> tuple[str, float, float]:
    """Return the hash of the last weights, and the held-out rewards before and after."""
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["eval/sampled"] for row in rows if "eval/sampled" in row]
    return ledger[-1]["weights"], rewards[0], rewards[-1]


if __name__ == "__main__":
    for row in run():
        print(*row, sep=" | ")
