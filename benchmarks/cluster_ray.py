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
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import demo  # noqa: E402

CLUSTER = ["cluster.nodes=2", "rollout.workers=2"]
LIMIT_S = 7200.0

Row = tuple[str, str, str]  # what, result, how


def run() -> list[Row]:
    """Run the demo in one process, then its GRPO again on two Ray nodes. Raises RuntimeError if the
    weights differ or the held-out reward does not rise."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _python(["examples/demo.py", "--folder", str(folder)])
        warm = max((folder / "sft" / "hf").glob("step_*"))
        overrides = [*demo.recipe(folder, 0, "train", model=warm), f"run.folder={folder / 'ray'}"]
        ray_s = _python(["-m", "tandem", "train", "recipes/demo.toml", *overrides, *CLUSTER])
        expected, _, _ = _end(folder / "train")
        found, before, after = _end(folder / "ray")
    if found != expected:
        raise RuntimeError(f"on two nodes the weights are {found}, in one process {expected}")
    if after <= before:
        raise RuntimeError(f"the held-out reward went from {before:.3f} to {after:.3f}")
    how = f"recipes/demo.toml, {' '.join(CLUSTER)}; {ray_s:.0f} s, Ray's start included"
    return [
        ("the demo's GRPO on two Ray nodes: weights", f"{found[:16]}, as in one process", how),
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
