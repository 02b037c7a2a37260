"""`make bench`: every ratio of results/performance.md, baseline and Tandem alternating on this
machine, in one run.

    python benchmarks/run.py [decode] [long] [ragged] [bfloat16] [trainer] [tiny] [smollm2] [workers] [commands] [vllm]    default: all but vllm

vllm needs vLLM's own environment (`make .venv-vllm/.ready`). It rewrites results/performance.md, where each processor keeps its own results.

Every side runs with the allocator settings that Tandem gives itself (memory stays with the
process), and with as many threads as there are cores. Refuses to judge while other processes use
more than 10% of the CPU.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import machine
import torch
from performance_page import RESULTS, write_page

ROOT = Path(__file__).parent.parent
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}  # Tandem's own, for every side
# without AVX-512 the other side's bfloat16 takes minutes a token
WIDE = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
BFLOAT16 = ("bfloat16",) if WIDE else ()
SMOLLM2 = ROOT / "runs" / "smollm2" / "model"
TINY = ROOT / ".cache" / "bench-tiny"


def main() -> int:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in sys.argv[1:] or [name for name in SECTIONS if name != "vllm"]:
        print(f"== {name}", flush=True)
        if not quiet():
            return 2
        result = SECTIONS[name]()
        if not quiet():  # then it was perhaps not while this was measured
            return 2
        about = machine.describe()
        own = results.setdefault(about.partition(";")[0], {})
        own[name] = {"machine": about, "date": str(date.today()), **result}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        write_page(results)
    return 0


def quiet() -> bool:
    share = machine.others_cpu_share()
    if share > 0.10:
        print(
            f"error: other processes use {share:.0%} of the CPU\n  expected: at most 10%\n  next:     stop them, then make bench"
        )
    return share <= 0.10


def decode() -> dict:
    return run("decode.py", str(model_with_examples()), "steady", *BFLOAT16)


def long() -> dict:
    return run("decode.py", str(model_with_examples()), "long")


def ragged() -> dict:
    return run("decode.py", str(model_with_examples()), "ragged", "shared", "exact")


def bfloat16() -> dict:
    return run("bfloat16.py", str(model_with_examples()))


def tiny() -> dict:
    """TRL's own small setting: 1.06M parameters, 32 prompts x 8 samples x 16 tokens, none stops
    early."""
    if not (TINY / "data.jsonl").exists():
        run_plain("make_tiny_bench.py", str(TINY))
    return paired(
        [str(TINY), str(TINY / "data.jsonl"), "32", "8", "16", "10", "1", "whole"], rounds=2
    )


def smollm2() -> dict:
    """4 prompts x 8 samples of 64 new tokens, none stops early, of SmolLM2-135M: with equal
    settings on both sides, all 32 sequences at once (with AVX-512 in bfloat16, too), and 8 sequences
    or 1,024 tokens at a time with activation checkpointing."""
    model_with_examples()
    work = [str(SMOLLM2), str(ROOT / "runs/smollm2/data/train.jsonl"), "4", "8", "64", "4", "1"]
    kinds = ("whole", "checkpointed", *BFLOAT16)
    return {kind: paired([*work, kind], rounds=1) for kind in kinds}


def trainer() -> dict:
    return run("trainer.py", str(model_with_examples()))


def workers() -> dict:
    """Seconds a step of whole runs of `tandem train`, without workers and with one, by turns: the
    median of the steps after the first two, of three runs each."""
    if not (TINY / "data.jsonl").exists():
        run_plain("make_tiny_bench.py", str(TINY))
    path, data = model_with_examples(), ROOT / "runs/smollm2/data/train.jsonl"
    small = (str(TINY), str(TINY / "data.jsonl"), "rl.prompts_per_step=32", "run.steps=12")
    large = (str(path), str(data), "rl.prompts_per_step=4", "run.steps=5")
    return {
        name: {str(count): statistics.median(steps) for count, steps in of_runs(*work).items()}
        for name, work in {"1M parameters": small, "SmolLM2-135M": large}.items()
    }


def of_runs(model: str, data: str, *overrides: str) -> dict[int, list[float]]:
    """Return the seconds of the steps by the number of workers."""
    found: dict[int, list[float]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        (recipe := Path(folder) / "empty.toml").write_text("")
        for number in range(6):
            run_folder = Path(folder) / str(number)
            command = [str(Path(sys.executable).with_name("tandem")), "train", str(recipe)]
            command += [
                f"model.path={model}",
                f"data.train={data}",
                f"run.folder={run_folder}",
                "model.dtype=float32",
            ]
            command += [f"reward.function={ROOT / 'examples/last_number.py'}:score"]
            command += [*overrides, f"rollout.workers={number % 2}", "rollout.max_new_tokens=64"]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
            rows = (run_folder / "timings.jsonl").read_text().splitlines()
            found[number % 2] += [json.loads(row)["step_s"] for row in rows[2:]]
    print(found, flush=True)
    return found


def paired(arguments: list[str], rounds: int) -> dict:
    runs = [
        (run("grpo_trl.py", *arguments), run("grpo_tandem.py", *arguments)) for _ in range(rounds)
    ]
    # the round least kind to Tandem
    best = min(runs, key=lambda pair: pair[0]["step_s"] / pair[1]["step_s"])
    theirs, ours = best
    return {
        "trl": theirs,
        "tandem": ours,
        "step_ratio": theirs["step_s"] / ours["step_s"],
        "memory_ratio": ours["rss_gib"] / theirs["rss_gib"],
        "memory_ratio_above_imports": (ours["rss_gib"] - ours["imports_gib"])
        / (theirs["rss_gib"] - theirs["imports_gib"]),
    }


def commands() -> dict:
    """Seconds of `tandem --help` and of an error in a recipe, medians of 9 processes each."""
    tandem = Path(sys.executable).with_name("tandem")
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "my.toml"
        recipe.write_text("[rl]\ngroup_sizes = 8\n")
        asked = {"tandem --help": (["--help"], 0), "an unknown key": (["train", str(recipe)], 2)}
        seconds = dict[str, float]()
        for what, (arguments, code) in asked.items():
            times = []
            for _ in range(9):
                start = time.perf_counter()
                done = subprocess.run([tandem, *arguments], capture_output=True, check=False)
                times.append(time.perf_counter() - start)
                assert done.returncode == code, done.stderr.decode()
            seconds[what] = statistics.median(times)
    print(seconds, flush=True)
    return {"seconds": seconds}


def vllm() -> dict:
    """Decode against vLLM on a CPU, each in a process of its own, by turns."""
    path, theirs = str(model_with_examples()), ROOT / ".venv-vllm" / "bin" / "python"
    if not theirs.exists():
        raise SystemExit("error: there is no vLLM\n  next:     make .venv-vllm/.ready")
    pythons = {"vllm": str(theirs), "tandem": sys.executable}
    rounds = [
        {side: run("decode_vllm.py", side, path, python=python) for side, python in pythons.items()}
        for _ in range(2)
    ]
    return {
        side: {
            batch: statistics.median(own[side][batch] for own in rounds)
            for batch in rounds[0][side]
        }
        for side in pythons
    }


def run(script: str, *arguments: str, python: str = sys.executable) -> dict:
    env = {**os.environ, **ALLOCATOR, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    # vLLM's processes print after it as they end
    result = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    print(result, flush=True)
    return result


def run_plain(script: str, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments], check=True, cwd=ROOT
    )


def model_with_examples() -> Path:
    sys.path.insert(0, str(ROOT))
    from examples.smollm2 import make_data, model_from_wheel

    make_data(ROOT / "runs/smollm2/data")
    return model_from_wheel(SMOLLM2)


SECTIONS = {
    "decode": decode,
    "long": long,
    "ragged": ragged,
    "bfloat16": bfloat16,
    "trainer": trainer,
    "tiny": tiny,
    "smollm2": smollm2,
    "workers": workers,
    "commands": commands,
    "vllm": vllm,
}

if __name__ == "__main__":
    sys.exit(main())
