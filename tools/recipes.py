"""`make recipes`: run the commands in each recipe's header, and write results/recipes.md.

    python tools/recipes.py [NAME ...]      of recipes/; default: all

One that says `Not run here` is planned, as it is and with a tiny model and generated rows.
"""

import json
import re
import shlex
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import machine  # noqa: E402

from tandem.run_folder.metrics import read_metrics  # noqa: E402

RESULTS, STAND_IN = ROOT / "results" / "recipes.json", ROOT / "runs" / "recipes"
TANDEM = [sys.executable, "-m", "tandem"]
HERE = {
    "model.path": STAND_IN / "model",
    "data.train": STAND_IN / "rows.jsonl",
    "data.prompt_column": "prompt",
    "data.answer_column": "answer",
    "eval.data": STAND_IN / "rows.jsonl",
    "train.backend": "tandem",  # Megatron asks for a GPU
    "rollout.cache_mb": 1024,
}
HEAD = """# Recipes

`make recipes` runs the commands in the header of each file of [recipes/](../recipes/), and writes this page. Where a CPU is not enough, it
plans the recipe with a tiny model and generated rows, and says what is missing here.

| recipe | what | expected | held-out reward | steps | seconds | machine |
|---|---|---|---|---|---|---|"""


def main() -> None:
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        if path.stem in (sys.argv[1:] or [path.stem]):
            head, _, rest = path.read_text().partition("\n#\n")
            commands = re.findall(r"^#   ((?:tandem|python) .*)", rest, re.M)
            [expected] = re.findall(r"Expected:? (.*?)(?:;|\.?$)", head, re.M)
            found = planned(path) if "Not run here" in head else ran(commands)
            rows[path.stem] = [head[2:].partition("\n")[0].rstrip("."), expected, *found]
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
            lines = [f"| {' | '.join([name, *rows[name]])} |" for name in sorted(rows)]
            RESULTS.with_suffix(".md").write_text("\n".join([HEAD, *lines, ""]))


def planned(path: Path) -> list[str]:
    """Plan a recipe as it is, and with what is on a hub replaced, which must be ready."""
    if not (STAND_IN / "rows.jsonl").exists():
        call([*TANDEM, "tiny", STAND_IN / "model", "--context", 40960])
        call([*TANDEM, "generate", "algebra", "--out", STAND_IN / "rows.jsonl"])
    plan, figures = [*TANDEM, "plan", path], STAND_IN / "plan.json"
    subprocess.run([*plan, "--json", figures], cwd=ROOT, check=False)
    reasons = "; ".join(["no GPU", *json.loads(figures.read_text())["reasons"]])
    call([*plan, *(f"{key}={value}" for key, value in HERE.items())])
    return [f"not run here: {reasons}", "", "", f"ready with stand-ins, {date.today()}"]


def ran(commands: list[str]) -> list[str]:
    """Run the commands one by one; those that train are planned first."""
    start = time.perf_counter()
    for command in commands:
        name, *words = shlex.split(command)
        if name == "tandem" and words[0] in ("train", "sft", "dpo", "distill"):
            call([*TANDEM, "plan", *words[1:], "--for", words[0]])
        call([*(TANDEM if name == "tandem" else [sys.executable]), *words])
    newest = max((ROOT / "runs").rglob("metrics.jsonl"), key=lambda file: file.stat().st_mtime)
    rows = read_metrics(newest.parent)
    held_out = [f"{row['eval/sampled']:.3f}" for row in rows if "eval/sampled" in row]
    about = [str(rows[-1]["step"]), f"{time.perf_counter() - start:.0f}"]
    return [f"{held_out[0]} -> {held_out[-1]}", *about, f"{machine.describe()}, {date.today()}"]


def call(words: list) -> None:
    subprocess.run([*map(str, words)], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
