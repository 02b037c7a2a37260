"""`make newest`: the core of the tests and a short demo with the versions that this environment has,
which are the newest ones; prints a row for docs/reference/versions.md.

    python tools/newest.py -n 0 -x      options for pytest, by default -n 2 --dist loadfile

Exit code 1 if a test, the demo or its replay fails. It does not know how the environment was made.
"""

import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from tandem.runtime.numerics import processor

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "newest"
CORE = [
    "model",
    "engine",
    "rl",
    "train",
    "rollout",
    "data",
    "test_step.py",
    "test_train_loop.py",
    "plugins/start/test_doctor.py",
]
SHORT = ["run.steps=4", "run.save_every=4", "sft.steps=40", "eval.every=4", "eval.samples=1"]
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "pydantic", "pyarrow")


def main(options: list[str]) -> int:
    report = FOLDER / "tests.xml"
    run("pytest", "-q", *options, f"--junitxml={report}", *(f"tests/{name}" for name in CORE))
    counts = ElementTree.parse(report).getroot()[0].attrib
    failed = int(counts["failures"]) + int(counts["errors"])
    passed = int(counts["tests"]) - failed - int(counts["skipped"])
    works = run("tandem", "demo", f"--folder={FOLDER / 'demo'}", "--fresh", *SHORT)
    works = works and run("tandem", "replay", str(FOLDER / "demo" / "train"), "--step", "4")
    tests = f"{passed} passed, {failed} failed, {counts['skipped']} skipped"
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    ends = "as it should" if works else "with an error"
    print(
        f"\n| {date.today()} | {platform.python_version()} | {libraries} | {tests} | {ends} | {processor()} |"
    )
    return int(failed > 0 or not works)


def run(module: str, *arguments: str) -> bool:
    """Run a module in this environment; return whether it ended well."""
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["-n", "2", "--dist", "loadfile"]))
