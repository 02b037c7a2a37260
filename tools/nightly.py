"""Runs what takes too long for a commit, each part in a process of its own, and writes how it ended
into results/nightly.md.

    make nightly                   every part
    make nightly only="tests"      these parts; the others keep the row that they have

`make check` reads the commit of the kernels' row there: it runs the tests of the kernels only where
they have changed since. Ends with 1 if a part fails.
"""

import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from tandem.runtime.numerics import processor

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "results" / "nightly.md"
PYTEST = ("-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
PARTS = {  # name: what it runs
    "tests": (*PYTEST, "tests", "--ignore=tests/gpu"),
    "kernels": (*PYTEST, "tests/gpu"),
    "beside": (*PYTEST, "-p", "tests.conftest", "chaos/tests", "benchmarks"),
    "mutants": ("tools/mutants.py",),
    "models": ("tools/models.py",),
    "invariants": ("tools/invariants.py",),
    "chaos": ("tools/chaos.py",),
}
HEAD = """# What runs at night

`make nightly` runs what takes too long for a commit: every test, those that `make check` leaves out
among them (`tests/nightly.txt`), the mutants, every architecture, the long proofs and the faults.

| part | command | result | minutes | commit | date | processor |
|---|---|---|---|---|---|---|
"""


def main(only: list[str]) -> int:
    if unknown := sorted(set(only) - set(PARTS)):
        print(f"unknown part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
        return 2
    rows, failed = read_rows(), []
    for name in only or PARTS:
        start = time.monotonic()
        code, last = run(PARTS[name])
        failed += [name] * (code != 0)
        minutes = f"{(time.monotonic() - start) / 60:.0f}"
        result = last if code == 0 else f"exit code {code}: {last}"
        cells = [f"`python {' '.join(PARTS[name])}`", result, minutes, commit(), str(date.today())]
        rows[name] = f"| {' | '.join([name, *cells, processor()])} |"
        PAGE.write_text(HEAD + "".join(f"{rows[part]}\n" for part in PARTS if part in rows))
    print(f"failed: {', '.join(failed)}" if failed else "every part has passed")
    return int(bool(failed))


def read_rows() -> dict[str, str]:
    text = PAGE.read_text() if PAGE.exists() else ""
    return {name: line for line, name in re.findall(r"^(\| (\w+) \| `.*)$", text, re.M)}


def run(arguments: tuple[str, ...]) -> tuple[int, str]:
    """Run a part; return its exit code and the last line that it printed."""
    last = ""
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line.strip("= \n").replace("|", "/") or last
    return process.returncode, last


def commit() -> str:
    asked = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(
        asked, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
