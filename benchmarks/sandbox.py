"""The sandbox measured: what the hostile programs got, and what a run costs; writes
results/sandbox.json and its table.

    python benchmarks/sandbox.py     # two to three minutes; bubblewrap must be installed

Every program of chaos/hostile runs under bubblewrap, and those that are safe to try also as plain
processes, which shows that they are able to do what they try. Times alternate with a bare
interpreter's in the same run.
"""

import json
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import machine  # noqa: E402

from chaos.hostile.cheats import CHEATS, TESTS, solution  # noqa: E402
from chaos.hostile.escapes import ESCAPES  # noqa: E402
from chaos.hostile.world import World  # noqa: E402
from tandem.plugins.graders.code import code_reward  # noqa: E402
from tandem.plugins.graders.sandbox.local import Bubblewrap, Unisolated  # noqa: E402
from tandem.plugins.graders.sandbox.protocol import run_python  # noqa: E402
from tandem.types import Problem  # noqa: E402

RUNS = 200
RUN_MS = 80  # a run's median must not take longer
RESULTS, DOCUMENT = ROOT / "results" / "sandbox.json", ROOT / "results" / "sandbox.md"


def main():
    busy = machine.others_cpu_share()
    figures = {
        "machine": machine.describe(),
        "date": str(date.today()),
        "others_cpu_share": round(busy, 2),
        "times_ms": times(),
        "escapes": escapes(),
        "cheats": cheats(),
    }
    RESULTS.write_text(lines_of(figures))
    text = table(figures)
    DOCUMENT.write_text(HEAD + text)
    print(text)
    misses = missed(figures)
    if misses:
        sys.exit(f"error: missed: {'; '.join(misses)}")


def lines_of(figures):
    """JSON with a line for each figure, and for each row of a list."""
    fields = []
    for name, value in figures.items():
        rows = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        fields.append(
            f" {json.dumps(name)}: " + (f"[\n  {rows}\n ]" if rows else json.dumps(value))
        )
    return "{\n" + ",\n".join(fields) + "\n}\n"


def missed(figures):
    """Return what is wrong, in words."""
    rows, median = figures["escapes"], figures["times_ms"]["run"]["median"]
    idle = [row["name"] for row in rows if not row["ran"]]
    out = [row["name"] for row in rows if row["escapes"]]
    passed = [f"{row['name']} ({row['form']})" for row in figures["cheats"] if row["reward"] > 0]
    found = {"did not run": idle, "escaped": out, "a false pass": passed}
    misses = [f"{what}: {', '.join(names)}" for what, names in found.items() if names]
    return misses + [f"a run takes {median:.1f} ms, over {RUN_MS}"] * (median > RUN_MS)


def times():
    """Median and 90th percentile, ms, of a run of `pass` and of what it is compared with."""
    sandbox, python = Bubblewrap(), Bubblewrap().python
    kinds = {
        "bare": lambda: subprocess.run([python, "-I", "-S", "-c", "pass"], check=True),
        "run": lambda: run_python(sandbox, "pass"),
        "run_bare": lambda: sandbox.run(["python", "-I", "-S", "-c", "pass"]),
    }
    samples = {kind: [] for kind in kinds}
    for _ in range(RUNS):
        for kind, act in kinds.items():
            start = time.perf_counter()
            act()
            samples[kind].append((time.perf_counter() - start) * 1e3)
    return {
        k: {"median": statistics.median(v), "p90": statistics.quantiles(v, n=10)[-1]}
        for k, v in samples.items()
    }


def escapes():
    rows = []
    with World() as world:
        for hostile in ESCAPES:
            inside = world.attack(Bubblewrap(), hostile)
            outside = world.attack(Unisolated(), hostile) if hostile.open else None
            rows.append(
                {
                    "name": hostile.name,
                    "ran": inside.ran,
                    "escapes": list(inside.escapes),
                    "stop_reason": inside.stop_reason,
                    "stopped_as_expected": inside.stop_reason in hostile.stops,
                    "without_a_sandbox": outside and bool(outside.escapes),
                }
            )
    return rows


def cheats():
    rows = []
    for cheat in CHEATS:
        for form, tests in TESTS.items():
            problem = Problem(uid="bench", messages=(), answer="", metadata={"tests": tests})
            reward = code_reward(
                problem, solution(cheat), sandbox=Bubblewrap(), test_timeout_s=0.5
            )["reward"]
            rows.append({"name": cheat.name, "form": form, "reward": reward})
    return rows


def table(figures):
    spent, rows, cheated = figures["times_ms"], figures["escapes"], figures["cheats"]
    tried = [row for row in rows if row["without_a_sandbox"] is not None]
    lines = [
        f"`python benchmarks/sandbox.py` on {figures['machine']}, {figures['date']}; other processes used "
        f"{figures['others_cpu_share']:.0%} of the cores at the start.",
        "",
        "| what | figure |",
        "|---|---|",
        f"| hostile programs, and how many of them ran | {len(rows)}, {sum(row['ran'] for row in rows)} |",
        f"| that got out or took more than their share | {sum(bool(row['escapes']) for row in rows)} |",
        f"| that ended for the expected reason | {sum(row['stopped_as_expected'] for row in rows)} |",
        f"| the same as plain processes: tried, and got through | {len(tried)}, {sum(r['without_a_sandbox'] for r in tried)} |",
        f"| cheats x forms of tests | {len({row['name'] for row in cheated})} x {len({row['form'] for row in cheated})} |",
        f"| of these with any reward | {sum(row['reward'] > 0 for row in cheated)} |",
        *(
            f"| {what} | {spent[k]['median']:.1f} ms, p90 {spent[k]['p90']:.1f} ms |"
            for k, what in KINDS.items()
        ),
        "",
    ]
    return "\n".join(lines)


HEAD = """# Hostile programs in the sandbox

[sandbox.md](../docs/guide/sandbox.md#how-it-was-tested) says what was tried. Every row is in [sandbox.json](sandbox.json).

"""
KINDS = {
    "run": "a run of `pass` as a script",
    "run_bare": "a run of `python -I -S -c pass`",
    "bare": "`python -I -S -c pass` without a sandbox",
}


if __name__ == "__main__":
    main()
