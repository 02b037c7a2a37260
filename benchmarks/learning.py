"""`make learning`: does everything learn? The demo on five seeds, every algorithm on three, and
what needs no reward; and SmolLM2-135M in both types of weights.

    python benchmarks/learning.py [demo] [bfloat16] [smollm2] [grpo] [ppo ...] [preferences] [distillation]     default: all; rewrites results/learning.md

All but SmolLM2 (`make smollm2-model` first) start from the demo's warm models (runs/learning/seed-N,
made by `demo`). Numbers are kept in results/learning.json.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import machine
import numpy as np

from tandem.run_folder.metrics import read_metrics

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "learning"
RESULTS = ROOT / "results" / "learning.json"
SEEDS = range(5)
FEW = range(3)  # seeds of everything but the demo
STEPS = 30
# One recipe for all: 64 problems x 8 samples, learning rate 6e-4, two updates a step, so that
# ratios and clips are at work.
BUDGET = [
    f"run.steps={STEPS}",
    "run.save_every=30",
    "eval.every=0",
    "eval.greedy=false",
    "rl.minibatches=2",
]
ALGORITHMS = {
    **{
        name: []
        for name in (
            "grpo",
            "dr_grpo",
            "rloo",
            "reinforce_pp",
            "reinforce_pp_baseline",
            "gspo",
            "cispo",
        )
    },
    "dapo": ["rl.max_gen_batches=64"],
    "ppo": ["critic.learning_rate=1e-3", "critic.warmup_steps=5"],
    "reinforce": ["rl.minibatches=1"],
}


def main() -> int:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    usual = ["demo", "bfloat16", "smollm2", *ALGORITHMS, "preferences", "distillation"]
    for name in sys.argv[1:] or usual:
        print(f"== {name}", flush=True)
        if name in ALGORITHMS:
            results.setdefault("algorithms", {})[name] = algorithm(name)
        else:
            results[name] = {
                "demo": demo,
                "bfloat16": lambda: demo("bfloat16-", ["model.dtype=bfloat16"]),
                "smollm2": smollm2,
                "preferences": preferences,
                "distillation": distillation,
            }[name]()
        part = "algorithms" if name in ALGORITHMS else name
        results.setdefault("where", {})[part] = f"{machine.describe()}; {date.today()}"
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        (ROOT / "results" / "learning.md").write_text(table(results))
    return 0


def demo(kind: str = "", changes: Sequence[str] = ()) -> list[dict]:
    """The whole demo, each seed in a fresh folder: data, model, SFT and RL all seeded."""
    rows = []
    for seed in SEEDS:
        folder = RUNS / f"{kind}seed-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        start = time.perf_counter()
        place = ["--folder", str(folder), "--seed", str(seed), "run.steps=60", "eval.every=20"]
        run([sys.executable, "-m", "tandem", "demo", *place, *changes])
        rows.append(
            {"seed": seed, **rise(folder / "train"), "seconds": time.perf_counter() - start}
        )
    return rows


def smollm2() -> list[dict]:
    """recipes/smollm2.toml in both types."""
    rows = []
    for seed in FEW:
        for dtype in ("float32", "bfloat16"):
            folder, start = RUNS / f"smollm2-{dtype}-{seed}", time.perf_counter()
            values = [f"run.seed={seed}", f"model.dtype={dtype}", f"run.folder={folder}"]
            run([*command("train", "smollm2"), *values, "run.save_every=30", "--fresh"])
            seconds = time.perf_counter() - start
            rows.append({"seed": seed, "dtype": dtype, **rise(folder), "seconds": seconds})
    return rows


def algorithm(name: str) -> list[dict]:
    rows = []
    for seed in FEW:
        folder = RUNS / f"{name}-{seed}"
        tandem("train", seed, folder, [*BUDGET, f"rl.algorithm={name}", *ALGORITHMS[name]])
        sampled = read_metrics(folder)[-1].get("batches", STEPS) * 64 * 8
        rows.append({"seed": seed, **rise(folder), "episodes": sampled})
    return rows


def preferences() -> dict:
    """Pairs of a right and a wrong answer, both the warm model's own; accuracy on pairs from
    held-out problems."""
    rows: dict = {"dpo": [], "ipo": [], "rm": []}
    for seed in FEW:
        pairs = [make_pairs(seed, part) for part in ("train", "test")]
        data = [
            f"preference.train={pairs[0]}",
            f"preference.test={pairs[1]}",
            "preference.steps=60",
        ]
        for name, command, special in (
            ("dpo", "dpo", ["preference.learning_rate=1e-4", "preference.beta=0.5"]),
            (
                "ipo",
                "dpo",
                ["preference.learning_rate=1e-4", "preference.beta=0.5", "preference.loss=ipo"],
            ),
            ("rm", "rm", ["preference.learning_rate=1e-3", "preference.steps=200"]),
        ):
            folder = RUNS / f"{name}-{seed}"
            seconds = tandem(command, seed, folder, [*data, *special, "eval.every=0"])
            first, *_, last = [row for row in read_metrics(folder) if "eval/accuracy" in row]
            row = {
                "seed": seed,
                "before": first["eval/accuracy"],
                "after": last["eval/accuracy"],
                "seconds": seconds,
            }
            if command == "dpo":
                row |= {
                    "reward_before": first["eval/sampled"],
                    "reward_after": last["eval/sampled"],
                }
            rows[name].append(row)
    return rows


def make_pairs(seed: int, part: str) -> Path:
    """`tandem rollout` of the warm model, then the first right and the first wrong answer of every
    problem that has both."""
    out, path = (
        RUNS / f"pairs-{seed}" / f"{part}.rollout.jsonl",
        RUNS / f"pairs-{seed}" / f"{part}.jsonl",
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    data = RUNS / f"seed-{seed}" / "data" / f"{part}.jsonl"
    overrides = [
        f"model.path={warm(seed)}",
        f"data.train={data}",
        "rl.group_size=8",
        f"run.seed={seed}",
    ]
    run([*command("rollout"), *overrides, "--out", str(out), "--fresh"])
    problems: dict[str, dict] = {}
    for line in out.read_text().splitlines():
        row = json.loads(line)
        answers = problems.setdefault(row["uid"], {"prompt": row["messages"]})
        answers.setdefault("chosen" if row["reward"] == 1.0 else "rejected", row["text"])
    whole = [row for row in problems.values() if len(row) == 3]
    path.write_text("".join(json.dumps(row) + "\n" for row in whole))
    return path


def distillation() -> list[dict]:
    """From the demo's trained model of the same seed back into its warm start, without any
    reward."""
    rows = []
    for estimator in ("exact", "sampled"):
        for seed in FEW:
            folder = RUNS / f"distill-{estimator}-{seed}"
            teacher = RUNS / f"seed-{seed}" / "train" / "hf" / "step_000060"
            special = [f"distill.teacher={teacher}", f"distill.estimator={estimator}"]
            seconds = tandem(
                "distill", seed, folder, [*BUDGET, "rl.algorithm=reinforce_pp", *special]
            )
            kl = [row["teacher_kl"] for row in read_metrics(folder) if "teacher_kl" in row]
            rows.append(
                {
                    "estimator": estimator,
                    "seed": seed,
                    "kl_before": kl[0],
                    "kl_after": float(np.mean(kl[-3:])),
                    **rise(folder, gap=False),
                    "seconds": seconds,
                }
            )
    return rows


def tandem(name: str, seed: int, folder: Path, overrides: list[str]) -> float:
    """Run a command on the warm model of a seed; returns its seconds."""
    data = RUNS / f"seed-{seed}" / "data"
    start = time.perf_counter()
    run(
        [
            *command(name),
            f"model.path={warm(seed)}",
            f"data.train={data}/train.jsonl",
            f"eval.data={data}/test.jsonl",
            f"run.seed={seed}",
            f"run.folder={folder}",
            *overrides,
            "--fresh",
        ]
    )
    return time.perf_counter() - start


def command(name: str, recipe: str = "demo") -> list[str]:
    return [sys.executable, "-m", "tandem", name, f"recipes/{recipe}.toml"]


def warm(seed: int) -> Path:
    return RUNS / f"seed-{seed}" / "sft" / "hf" / "step_000400"


def run(arguments: list[str]) -> None:
    subprocess.run(arguments, check=True, cwd=ROOT)


def rise(folder: Path, *, gap: bool = True) -> dict[str, float]:
    rows = read_metrics(folder)
    evals = [row["eval/sampled"] for row in rows if "eval/sampled" in row]
    gaps = (
        {"gap": float(np.max([row["logprob_gap"] for row in rows if "logprob_gap" in row]))}
        if gap
        else {}
    )
    return {"before": evals[0], "after": evals[-1], **gaps}


def table(results: dict) -> str:
    lines = ["# What learns, and how far", ""]
    lines += ["Written by `make learning` (`benchmarks/learning.py`). Held-out reward is sampled"]
    lines += ["at temperature 1, 64 problems x 4 samples. Each section names its machine.", ""]
    titles = {
        "demo": "The demo on five seeds, float32",
        "bfloat16": "The demo on five seeds, bfloat16",
        "smollm2": "SmolLM2-135M in both types of weights",
    }
    about = {
        "smollm2": "recipes/smollm2.toml, 20 problems x 4 samples, and after 30 steps; seconds are of the whole run."
    }
    of_demo = "The warm start and after 60 steps; seconds are of the whole demo."
    for name in (name for name in titles if name in results):
        lines += [f"## {titles[name]}", ""]
        lines += [f"{results['where'][name]}. {about.get(name, of_demo)}", ""]
        lines += [
            "| seed | before | after | rise | largest log-prob gap | seconds |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['seed']}{', ' * ('dtype' in r)}{r.get('dtype', '')} | {r['before']:.3f} | {r['after']:.3f} "
            f"| {r['after'] - r['before']:+.3f} | {r['gap']} | {r['seconds']:.0f} |"
            for r in results[name]
        ] + [""]
    if "algorithms" in results:
        lines += algorithm_table(results["algorithms"], results["where"]["algorithms"])
    if "preferences" in results:
        lines += preference_table(results["preferences"], results["where"]["preferences"])
    if "distillation" in results:
        lines += [
            "## Distillation",
            "",
            f"{results['where']['distillation']}.",
            "From the demo's trained model into its own warm start; no reward is used. KL is the",
        ]
        lines += [
            "student's reverse KL to the teacher, nats a token, at the first step and the mean of the last three.",
            "",
        ]
        lines += [
            "| estimator | seed | KL before | after | reward before | after | seconds |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['estimator']} | {r['seed']} | {r['kl_before']:.4f} | {r['kl_after']:.4f} | {r['before']:.3f} "
            f"| {r['after']:.3f} | {r['seconds']:.0f} |"
            for r in results["distillation"]
        ] + [""]
    return "\n".join(lines)


def algorithm_table(results: dict[str, list[dict]], where: str) -> list[str]:
    lines = ["## Every algorithm, the same budget", "", f"{where}."]
    lines += [
        f"{STEPS} steps of 64 problems x 8 samples from the same warm models, learning rate 6e-4, two updates a step;"
    ]
    lines += [
        "not tuned for any of them. `ppo` trains its critic alone for the first five steps; `reinforce` makes one"
    ]
    lines += [
        "update; `dapo` samples more episodes to fill its steps, up to 64 batches when nearly every problem is solved."
    ]
    lines += ["Held-out reward:", ""]
    lines += [
        f"| algorithm | {' | '.join(f'seed {s}' for s in FEW)} | mean rise | largest gap | episodes |"
    ]
    lines += ["|---" * (len(FEW) + 4) + "|"]
    for name, own in results.items():
        rises = [row["after"] - row["before"] for row in own]
        cells = " | ".join(f"{row['before']:.3f} -> {row['after']:.3f}" for row in own)
        episodes = np.mean([row["episodes"] for row in own])
        gaps = [row["gap"] for row in own]
        gap = "not measured" if None in gaps else max(gaps)
        lines.append(f"| `{name}` | {cells} | {np.mean(rises):+.3f} | {gap} | {episodes:,.0f} |")
    return [*lines, ""]


def preference_table(results: dict, where: str) -> list[str]:
    lines = [
        "## Preferences",
        "",
        f"{where}.",
        "Pairs of a right and a wrong answer that the warm model gave itself; accuracy on pairs from",
    ]
    lines += ["held-out problems. Reward is the held-out reward of the policy.", ""]
    lines += [
        "| | seed | accuracy before | after | reward before | after | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in results.items():
        for r in rows:
            reward = (
                f"{r['reward_before']:.3f} | {r['reward_after']:.3f}"
                if "reward_before" in r
                else " | "
            )
            lines.append(
                f"| `{name}` | {r['seed']} | {r['before']:.3f} | {r['after']:.3f} | {reward} | {r['seconds']:.0f} |"
            )
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(main())
