"""`make plan-accuracy`: results/plan_accuracy.md, with what `tandem plan` says of recipes and what they take.

    python benchmarks/plan_accuracy.py            measures (a quiet machine, minutes), then writes the page
    python benchmarks/plan_accuracy.py lora dpo   these recipes alone, and nothing is written
    python benchmarks/plan_accuracy.py --page     writes the page from results/plan_accuracy.json
    python benchmarks/plan_accuracy.py --memory   in spite of other processes; keeps the seconds measured before

A recipe is planned and then run for a few steps, each by its command in a process of its own. The
memory is the sum of the peaks (VmHWM) of all processes of the run; the seconds are the median of a
step, without the first two.
"""

import json
import os
import shutil
import statistics
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
from tandem.run_folder.metrics import read_metrics  # noqa: E402
from tandem.runtime.processes import descendants  # noqa: E402
from tests.support.datasets import write_algebra  # noqa: E402
from tests.support.runs import pair  # noqa: E402

JSON, PAGE = ROOT / "results" / "plan_accuracy.json", ROOT / "results" / "plan_accuracy.md"
SMOLLM2 = ROOT / "runs" / "smollm2" / "model"
STEPS, SAVED, SKIPPED, LIMIT_S = 9, 4, 2, 1800  # a save slows the step beside it
EARLIER = ", measured before the memory, with an earlier commit"
MEMORY_BAR, TIME_BAR = 0.15, 0.30
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
    timed = "--memory" not in arguments
    others = machine.others_cpu_share()
    if timed and others > 0.10:
        print("error: other processes use the CPU\n  next:     stop them, or --memory")
        return 2
    names = [name for name in arguments if name != "--memory"] or list(RECIPES)
    names = [name for name in names if name != "smollm2" or SMOLLM2.is_dir()]
    with tempfile.TemporaryDirectory() as temporary:
        make_inputs(folder := Path(temporary))
        rows, before = {}, json.loads(JSON.read_text())["rows"]
        for name in names:
            rows[name] = measure(folder, timed, *RECIPES[name])
            if not timed and name in before:
                rows[name] |= {key: before[name][key] for key in ("planned_s", "measured_s")}
            print(f"{name:<14}", summary(rows[name]), f"load {os.getloadavg()[0]:.1f}", flush=True)
    result = {
        "machine": machine.describe(),
        "date": str(date.today()),
        "steps": STEPS,
        "saved": SAVED,
        "threads": os.environ.get("OMP_NUM_THREADS", "not set"),
        "others_cpu_share": others,
        "rows": rows,
        "seconds_kept": not timed,
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


def measure(folder: Path, timed: bool, command: str, overrides: list[str]) -> dict[str, Any]:
    """Plan a recipe, then run it; return what was planned and measured."""
    arguments = ["recipe.toml", *overrides, "run.folder=run"]
    plan = [sys.executable, "-m", "tandem", "plan", *arguments, "--for", command]
    shutil.rmtree(folder / "run", ignore_errors=True)
    quiet = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}}
    options = ["--time"] * timed + ["--json", "plan.json"]
    subprocess.run([*plan, *options], check=True, capture_output=True, **quiet)
    planned = json.loads((folder / "plan.json").read_text())
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem", command, *arguments], stdout=subprocess.DEVNULL, **quiet
    )
    peaks = watch(process)
    steps = [
        row["step_s"] for row in read_metrics(folder / "run", "timings.jsonl") if "step_s" in row
    ]
    return {
        "command": " ".join(["tandem", command, *overrides]).replace(f"{ROOT}/", ""),
        "planned_bytes": sum(planned["memory"].values()),
        "planned": planned["memory"],
        "measured_bytes": sum(peaks.values()),
        "processes": len(peaks),
        "planned_s": planned.get("step_s"),
        "measured_s": statistics.median(steps[SKIPPED:]) if timed else None,
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
    text = f"{planned:8,.0f} MiB planned, {measured:8,.0f} measured, {planned / measured:.2f}x"
    if row["measured_s"] is None:
        return text
    share = row["planned_s"] / row["measured_s"]
    return (
        f"{text}; {row['planned_s']:.3f} s planned, {row['measured_s']:.3f} measured, {share:.2f}x"
    )


def write_page(result: dict[str, Any]) -> None:
    """Write the page of what was measured."""
    rows = result["rows"]
    shares = {name: row["planned_bytes"] / row["measured_bytes"] for name, row in rows.items()}
    within = sum(abs(share - 1) <= MEMORY_BAR for share in shares.values())
    times = [row["planned_s"] / row["measured_s"] for row in rows.values() if row["measured_s"]]
    timed = (
        f"{sum(abs(share - 1) <= TIME_BAR for share in times)} of {len(times)} within {TIME_BAR:.0%}"
        if times
        else "not measured yet: it needs a machine that nobody else uses"
    )
    lines = [
        "# What `tandem plan` says, and what runs take",
        "",
        "Written by `make plan-accuracy` (benchmarks/plan_accuracy.py). Each recipe is planned and then run, by its command in a process of",
        f"its own: {result['steps']} steps, a checkpoint at step {result['saved']}. Memory is the sum of the peaks (`VmHWM`) of all processes of the run; seconds",
        "are the median of a step. All models but `smollm2`'s are random: what matters are the shapes.",
        "",
        f"{result['machine']}; OMP_NUM_THREADS {result['threads']}; {result['date']}.",
        "",
        f"- Memory: {within} of {len(rows)} within {MEMORY_BAR:.0%}, the farthest {max(shares.values(), key=lambda share: abs(share - 1)):.2f}x.",
        f"- Seconds of a step (`--time`): {timed}{EARLIER * result['seconds_kept']}.",
        "",
        "| recipe | command | planned, MiB | measured, MiB | planned / measured | planned, s | measured, s | planned / measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        planned, measured = (row[key] / 2**20 for key in ("planned_bytes", "measured_bytes"))
        seconds = "| | | |"
        if row["measured_s"]:
            share = row["planned_s"] / row["measured_s"]
            seconds = f"| {row['planned_s']:.3g} | {row['measured_s']:.3g} | {share:.2f} |"
        lines.append(
            f"| {name} | `{row['command']}` | {planned:,.0f} | {measured:,.0f} | {shares[name]:.2f} {seconds}"
        )
    PAGE.write_text("\n".join([*lines, "", *ABOUT]) + "\n")


ABOUT = [
    "## Where the figures come from",
    "",
    "Weights, packs, moments, gradients, kept activations, pages of the cache and a save under way are arithmetic over the shapes, for as many",
    "tokens as a step has if every completion is as long as `rollout.max_new_tokens` allows (plugins/plan/footprint.py, plugins/plan/plan_memory.py). What this",
    "process of `tandem plan` holds once it has read the data is what a run begins with. Measured once, on these recipes, and written down:",
    "80 MiB of libraries and kernels in every run, 100 MiB of kernels of gradients, 45 MiB of an engine, 3/8 MiB a row that it decodes, and the",
    "small processes beside it. So",
    "they are a fit to the recipes above, but for `smollm2`, which came after. Memory of a reward function or an environment of yours is not",
    "counted. On a GPU the plan has the whole cache and microbatch.",
    "",
    "Seconds (`tandem plan --time`) are those of the run itself with random models of one and of two layers, and as much again for each further",
    "layer. A random model hardly ever ends its turn early; a trained one may, and its steps are shorter then. The line says how long the",
    "completions were.",
]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
