"""Tests that run when, by two lists of folders, files, fixtures (their tests) and functions.

tests/long.txt     what takes long: `make test` leaves it out, `make check` runs it; `make
                   long-tests` renews its functions from the seconds of a whole run.
tests/nightly.txt  what only `make nightly` runs. A parameter is marked where it stands, by
                   `pytest.param(..., marks=pytest.mark.nightly)`.

Two files are never long: what nobody may change without seeing it at once.
"""

from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
LONG = TESTS / "long.txt"
LIMIT_S = 1.0  # of a test function, with all its parameters and what it sets up
NEVER = ("tests/gpu/test_compiled_for_gpus.py", "tests/invariants/test_parity.py")


def mark(items):
    """Mark those of pytest's items that are listed."""
    lists = {"long": set(read(LONG)), "nightly": set(read(TESTS / "nightly.txt"))}
    for item in items:
        function = item.nodeid.partition("[")[0]
        file = function.partition("::")[0]
        fixtures = (f"{file}::{name}" for name in item.fixturenames)
        for name, listed in lists.items():
            if listed & {function, file, *map(str, Path(file).parents), *fixtures}:
                item.add_marker(getattr(pytest.mark, name))


def record(reports):
    """Write the list from pytest's reports. What was listed and has not run stays: what it needs is
    not installed, or it is no function."""
    listed = set(read(LONG))
    seconds = Counter()
    for report in reports:
        if report.when != "teardown" and not report.skipped:
            seconds[report.nodeid.partition("[")[0]] += report.duration
    apart = (*NEVER, *(f"{place}::" for place in listed if "::" not in place))
    long = {name for name, s in seconds.items() if s > LIMIT_S and not name.startswith(apart)}
    long |= listed - seconds.keys()
    LONG.write_text("".join(f"{name}\n" for name in sorted(long)), encoding="utf-8")


def read(path):
    return path.read_text(encoding="utf-8").splitlines()
