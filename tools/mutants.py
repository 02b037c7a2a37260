"""Small bugs put into Tandem one at a time, each of which a named test must find.

    make mutants                    all of them
    make mutants only="kl parallel/" those whose file or name contains one of these words

mutants.txt has them: the file under tandem/ with the tests (files or node ids under tests/), then
each mutant's name, the lines that are there (-) and those that it puts in their place (+). A text
that no longer fits is to be refreshed there.

Works on a copy of the tree in a temporary folder. First the named tests run on the copy as it is,
where they must pass; then each mutant is applied alone and its tests run until the first failure.
Ends with 1 if a mutant survives, if its text is not in its file exactly once, or if its tests could
not run.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
import torch  # noqa: F401  (it and transformers are what takes long to import)
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

ROOT = Path(__file__).parent.parent
PARTS = ("tandem", "tests", "benchmarks", "chaos", "recipes", "examples", "pyproject.toml")
PASSED, FAILED = 0, 1  # exit codes of pytest; others mean that no test could run
HANG_S = 900  # a mutant that hangs is found


@dataclass(frozen=True)
class Mutant:
    """A bug: `old` becomes `new` in tandem/`file`; `tests` are files or node ids under tests/."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_mutants(path: Path) -> list[Mutant]:
    mutants, file, tests = [], "", ()
    for block in path.read_text().strip().split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("["):
            file, _, names = lines.pop(0)[1:].partition("] ")
            tests = tuple(names.split())
        old, new = (
            "\n".join(line[2:] for line in lines if line.startswith(f"{sign} ")) for sign in "-+"
        )
        mutants.append(Mutant(lines[0], file, old, new, tests))
    return mutants


def main(words: list[str]) -> int:
    mutants = read_mutants(Path(__file__).with_suffix(".txt"))
    chosen = [
        m for m in mutants if not words or any(word in f"{m.file} {m.name}" for word in words)
    ]
    misfits = [m for m in chosen if (ROOT / "tandem" / m.file).read_text().count(m.old) != 1]
    for mutant in misfits:
        print(f"does not fit: {mutant.name}: its text is not in {mutant.file} exactly once")
    chosen = [mutant for mutant in chosen if mutant not in misfits]
    if not chosen:
        print("no mutant to run")
        return 1
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        tree = copy_tree(Path(place))
        every_test = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        if run_tests(tree, every_test) != PASSED:
            print((tree / "output").read_text()[-3000:])
            print("the tests fail without a mutant")
            return 1
        survivors = [mutant for mutant in chosen if not is_found(tree, mutant)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants found")
    return int(bool(survivors or misfits))


def copy_tree(place: Path) -> Path:
    for name in PARTS:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, place / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, place / name)
    return place


def is_found(tree: Path, mutant: Mutant) -> bool:
    """Run a mutant's tests with the mutant applied, and say what became of it."""
    file, start = tree / "tandem" / mutant.file, time.monotonic()
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        code = run_tests(tree, mutant.tests)
    finally:
        file.write_text(text)
    verdict = {PASSED: "SURVIVED", FAILED: "found"}.get(code, f"NOT RUN, pytest ended with {code}")
    print(f"{verdict}: {mutant.name}, {time.monotonic() - start:.0f} s", flush=True)
    return code == FAILED


def run_tests(tree: Path, tests: tuple[str, ...]) -> int:
    """Run tests in a fork, which saves the seconds that libraries take to be imported; return
    pytest's exit code, FAILED if the tests hang."""
    sys.stdout.flush()
    output = tree / "output"
    if not (child := os.fork()):
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        # a byte code file of the same second and size would be taken for the mutant's
        os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        options = ["-x", "-q", "-p", "no:cacheprovider"]
        os._exit(pytest.main([*options, *(f"tests/{test}" for test in tests)]))
    deadline = time.monotonic() + HANG_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return FAILED
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(ended[1])
    if code not in (PASSED, FAILED):
        print(output.read_text(errors="replace")[-2000:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
