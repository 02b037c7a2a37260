"""`make chaos`: inject real faults, section by section; write results/chaos.json and results/chaos.md.

    make chaos                              every section
    make chaos only="checkpoints kills"     these; the results of the others stay as they are

A section is a function of chaos/ that returns rows (chaos/results.py), here with a deadline; it
runs in a process of its own, and misses its bar if it leaves anything behind (chaos/harness.py).
Exit code 1 when a section that ran misses its bar.
"""

import json
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import machine  # noqa: E402

from chaos import (  # noqa: E402
    checkpoints,
    deadlocks,
    historical,
    kills,
    leaving,
    rank_kills,
    ranks,
    ray_faults,
    schedules,
    soak,
    workers,
)
from chaos.harness import Outcome, Section, run_section  # noqa: E402
from chaos.results import Result  # noqa: E402

# In the order of results/chaos.md. A new one is an import and a line.
SECTIONS = (
    Section(name="checkpoints", run=checkpoints.section, deadline_s=900),
    Section(name="deadlocks", run=deadlocks.section, deadline_s=1800),
    Section(name="kills", run=kills.section, deadline_s=5400),
    Section(name="rank_kills", run=rank_kills.section, deadline_s=3600),
    Section(name="workers", run=workers.section, deadline_s=3600),
    Section(name="ranks", run=ranks.section, deadline_s=2400),
    Section(name="ray", run=ray_faults.healing, deadline_s=7200),
    Section(name="ray_ends", run=ray_faults.ending, deadline_s=9000),
    Section(name="schedules", run=schedules.section, deadline_s=2400),
    Section(name="historical", run=historical.section, deadline_s=1200),
    Section(name="leaving", run=leaving.section, deadline_s=5400),
    Section(name="soak", run=soak.section, deadline_s=5400),
)

JSON, PAGE = ROOT / "results" / "chaos.json", ROOT / "results" / "chaos.md"


def main(only: list[str]) -> int:
    if unknown := sorted(set(only) - {section.name for section in SECTIONS}):
        names = ", ".join(section.name for section in SECTIONS)
        print(f"unknown section: {', '.join(unknown)}; there are {names}")
        return 2
    missed = []
    for section in SECTIONS:
        if not only or section.name in only:
            print(f"{section.name}: at most {section.deadline_s / 60:g} minutes", flush=True)
            outcome = run_section(section)
            keep(section.name, outcome)
            print("\n".join(table(section.name, read_all()[section.name])), flush=True)
            missed += [section.name] * (not outcome.met)
    PAGE.write_text(page())
    print(f"missed: {', '.join(missed)}" if missed else "every bar is met")
    return int(bool(missed))


def keep(name: str, outcome: Outcome) -> None:
    """Write the outcome of a section into results/chaos.json, over the one before."""
    entry = {
        "command": f"make chaos only={name}",
        "date": str(date.today()),
        "machine": machine.describe(),
        "met": outcome.met,
        "problem": outcome.problem,
        "left": outcome.left,
        "seconds": round(outcome.seconds),
        "rows": [asdict(row) for row in outcome.rows],
    }
    JSON.write_text(json.dumps({**read_all(), name: entry}, indent=1, ensure_ascii=False) + "\n")


def read_all() -> dict[str, Any]:
    return json.loads(JSON.read_text()) if JSON.exists() else {}


def page() -> str:
    entries = read_all()
    lines = [
        "# Chaos",
        "",
        "Written by `make chaos`, section by section: the faults that were injected, how many of",
        "them were seen to fire, and how often the end was the right one. Nothing may be left",
        "behind: no process, file or shared memory.",
    ]
    for section in SECTIONS:
        if section.name in entries:
            lines += ["", *table(section.name, entries[section.name])]
    return "\n".join(lines) + "\n"


def table(name: str, entry: dict[str, Any]) -> list[str]:
    rows = [Result(**row) for row in entry["rows"]]
    verdict = "Every bar is met" if entry["met"] else "**A bar is missed**"
    lines = [
        f"## {name}",
        "",
        f"{verdict}. `{entry['command']}`, {entry['date']}, {entry['seconds']} s; "
        f"{entry['machine']}.",
    ]
    lines += [f"**{entry['problem']}**"] if entry["problem"] else []
    lines += [f"**left behind: {'; '.join(entry['left'])}**"] if entry["left"] else []
    lines += [
        "",
        "| what | faults | seen to fire | right end | of at least | s | |",
        "|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {row.what} | {row.injected:,} | {row.witnessed:,} | {row.survived:,} "
        f"| {row.expected:,} | {row.seconds:.1f} | {'' if row.met else '**missed** '}{row.note} |"
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
