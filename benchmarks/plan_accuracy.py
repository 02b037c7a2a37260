"""`make plan-accuracy`: results/plan_accuracy.md, with what `tandem plan` says of recipes and what they take.

    python benchmarks/plan_accuracy.py            measures (minutes), then writes the page
    python benchmarks/plan_accuracy.py lora dpo   these recipes alone, and nothing is written
    python benchmarks/plan_accuracy.py --page     writes the page from results/plan_accuracy.json

A recipe is planned and then run for a few steps, each by its command in a process of its own. The
memory is the sum of the peaks (VmHWM) of all processes of the run.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import machine  # noqa: E402

from tandem.model.tiny import make_tiny  # noqa: E402
from tandem.runtime.processes import descendants  # noqa: E402
from tests.support.datasets import write_algebra  # noqa: E402
from tests.support.runs import pair  # noqa: E402

JSON, PAGE = ROOT / "results" / "plan_accuracy.json", ROOT / "results" / "plan_accuracy.md"
SMOLLM2 = ROOT / "runs" / "smollm2" / "model"
STEPS, SAVED, LIMIT_S = 9, 4, 1800
BAR = 0.15
SHAPE = {"hidden": 384, "layers": 6, "heads": 6, "kv_heads": 3, "intermediate": 1536}
RECIPE = f"""
[run]
steps = {STEPS}
save_every = {SAVED}
show_samples = 0
[model]
path = "model"
[data]
train = "data/train.jsonl"
[reward]
function = "reward.py:score"
[rollout]
max_new_tokens = 64
cache_mb = 256
[rl]
prompts_per_step = 8
group_size = 8
[train]
tokens_per_microbatch = 2048
[sft]
train = "data/warm.jsonl"
steps = {STEPS}
batch_size = 32
[preference]
train = "pairs.jsonl"
steps = {STEPS}
batch_size = 16
[distill]
teacher = "teacher"
"""
RECIPES = {  # name: (command, overrides)
    "demo": ("train", ["model.path=tiny", "rl.prompts_per_step=64", "rollout.max_new_tokens=32"]),
    "grpo": ("train", []),
    "ppo": ("train", ["rl.algorithm=ppo", "rl.minibatches=2"]),
    "kl": ("train", ["rl.kl_coef=0.05"]),
    "sft": ("sft", []),
    "dpo": ("dpo", []),
    "rm": ("rm", []),
    "distill": ("distill", []),
    "lora": ("train", ["lora.rank=8", "rl.kl_coef=0.05"]),
    "checkpointing": (
        "train",
        ["train.activation_checkpointing=true", "train.tokens_per_microbatch=4096"],
    ),
    "bfloat16": ("train", ["model.dtype=bfloat16"]),
    "workers": ("train", ["rollout.workers=2"]),
    "long": ("train", ["rollout.max_new_tokens=400", "rl.prompts_per_step=4"]),
    "smollm2": (
        "train",
        [
            f"model.path={SMOLLM2}",
            "rollout.max_new_tokens=24",
            "train.tokens_per_microbatch=1024",
            "data.train=words.jsonl",
        ],
    ),
}
REWARD = "def score(problem, completion):\n    return float(sum(map(ord, completion)) % 2)\n"


def main(*arguments: str) -> int:
    if "--page" in arguments:
        write_page(json.loads(JSON.read_text()))
        return 0
    names = list(arguments) or list(RECIPES)
    names = [name for name in names if name != "smollm2" or SMOLLM2.is_dir()]
    with tempfile.TemporaryDirectory() as temporary:
        make_inputs(folder := Path(temporary))
        rows = {}
        for name in names:
            rows[name] = measure(folder, *RECIPES[name])
            print(f"{name:<14}", summary(rows[name]), flush=True)
    result = {
        "machine": machine.describe(),
        "date": str(date.today()),
        "steps": STEPS,
        "saved": SAVED,
        "threads": os.environ.get("OMP_NUM_THREADS", "not set"),
        "rows": rows,
    }
    if names == [name for name in RECIPES if name in names] and len(names) >= 10:
        JSON.write_text(json.dumps(result, indent=1) + "\n")
        write_page(result)
    return 0


def make_inputs(folder: Path) -> None:
    """Write recipe, data, reward and models; chats and completions are as long as real ones."""
    write_algebra(folder / "data", num_train=64, num_test=8, num_warm=256)
    make_tiny(folder / "tiny", max_tokens=512)
    make_tiny(folder / "model", max_tokens=512, **SHAPE)
    make_tiny(folder / "teacher", max_tokens=512, seed=1, **SHAPE)
    (folder / "pairs.jsonl").write_text("".join(f"{pair(number)}\n" for number in range(64)))
    rows = [{"prompt": f"What is {n} plus {n + 1}?", "answer": str(2 * n + 1)} for n in range(32)]
    (folder / "words.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "recipe.toml").write_text(RECIPE)


def measure(folder: Path, command: str, overrides: list[str]) -> dict[str, Any]:
    """Plan a recipe, then run it; return what was planned and measured."""
    arguments = ["recipe.toml", *overrides, "run.folder=run"]
    plan = [sys.executable, "-m", "tandem", "plan", *arguments, "--for", command]
    shutil.rmtree(folder / "run", ignore_errors=True)
    quiet = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}}
    subprocess.run([*plan, "--json", "plan.json"], check=True, capture_output=True, **quiet)
    planned = json.loads((folder / "plan.json").read_text())
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem", command, *arguments], stdout=subprocess.DEVNULL, **quiet
    )
    peaks = watch(process)
    return {
        "command": " ".join(["tandem", command, *overrides]).replace(f"{ROOT}/", ""),
        "planned_bytes": sum(planned["memory"].values()),
        "planned": planned["memory"],
        "measured_bytes": sum(peaks.values()),
        "processes": len(peaks),
    }


def watch(process: subprocess.Popen[bytes]) -> dict[int, int]:
    """Wait for a run; return the most bytes that each of its processes has held.

    The last peak read counts, not the highest: before its `exec`, a process has its parent's.
    """
    peaks: dict[int, int] = {}
    end = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < end:
        for pid in [process.pid, *(child.pid for child in descendants(process.pid))]:
            peaks[pid] = peak_bytes(pid) or peaks.get(pid, 0)
        time.sleep(0.05)
    process.kill()
    assert process.wait() == 0, "the run has failed"
    return {pid: peak for pid, peak in peaks.items() if peak}


def peak_bytes(pid: int) -> int:
    """Return the peak of a process's memory; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def summary(row: dict[str, Any]) -> str:
    planned, measured = row["planned_bytes"] / 2**20, row["measured_bytes"] / 2**20
    return f"{planned:8,.0f} MiB planned, {measured:8,.0f} measured, {planned / measured:.2f}x"


def write_page(result: dict[str, Any]) -> None:
    """Write the page of what was measured."""
    rows = result["rows"]
    shares = {name: row["planned_bytes"] / row["measured_bytes"] for name, row in rows.items()}
    within = sum(abs(share - 1) <= BAR for share in shares.values())
    farthest = max(shares.values(), key=lambda share: abs(share - 1))
    lines = [
        "# What `tandem plan` says, and what runs take",
        "",
        "Written by `make plan-accuracy` (benchmarks/plan_accuracy.py). Each recipe is planned and then run, by its command in a process of",
        f"its own: {result['steps']} steps, a checkpoint at step {result['saved']}. Memory is the sum of the peaks (`VmHWM`) of all processes of the run.",
        "All models but `smollm2`'s are random: what matters are the shapes.",
        "",
        f"{result['machine']}; OMP_NUM_THREADS {result['threads']}; {result['date']}.",
        "",
        f"Memory: {within} of {len(rows)} within {BAR:.0%}, the farthest {farthest:.2f}x.",
        "",
        "| recipe | command | planned, MiB | measured, MiB | planned / measured |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        planned, measured = (row[key] / 2**20 for key in ("planned_bytes", "measured_bytes"))
        lines.append(
            f"| {name} | `{row['command']}` | {planned:,.0f} | {measured:,.0f} | {shares[name]:.2f} |"
        )
    PAGE.write_text("\n".join([*lines, "", *ABOUT]) + "\n")


ABOUT = [
    "## Where the figures come from",
    "",
    "Weights, packs, moments, gradients, kept activations, pages of the cache and a save under way are arithmetic over the shapes, for as many",
    "tokens as a step has if every completion is as long as `rollout.max_new_tokens` allows (plugins/plan/footprint.py). What this",
    "process of `tandem plan` holds once it has read the data is what a run begins with. Measured once, on these recipes, and written down:",
    "80 MiB of libraries and kernels in every run, 100 MiB of kernels of gradients, 45 MiB of an engine, 3/8 MiB a row that it decodes, and the",
    "small processes beside it. So",
    "they are a fit to the recipes above, but for `smollm2`, which came after. Memory of a reward function or an environment of yours is not",
    "counted. On a GPU the plan has the whole cache and microbatch.",
    "",
    "The seconds of a step are not planned: `run.steps=3` in a folder of its own measures them (timings.jsonl).",
]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
