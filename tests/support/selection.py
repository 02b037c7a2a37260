"""Tests that run when, by two lists.

tests/long.txt     functions that take long: `make test` leaves them out, `make check` runs them.
                   `make long-tests` makes the list anew from the seconds of a whole run.
tests/nightly.txt  folders, files and functions that only `make nightly` runs. A parameter is marked
                   where it stands, by `pytest.param(..., marks=pytest.mark.nightly)`.

Two files are never long: what nobody may change without seeing it at once.
"""

from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
LONG = TESTS / "long.txt"
LIMIT_S = 1.5  # of a test function, with all its parameters and what it sets up
NEVER = ("tests/gpu/test_compiled_for_gpus.py", "tests/invariants/test_parity.py")


def mark(items):
    """Mark those of pytest's items that are listed."""
    listed, nightly = set(read(LONG)), tuple(read(TESTS / "nightly.txt"))
    for item in items:
        function = item.nodeid.partition("[")[0]
        if function in listed:
            item.add_marker(pytest.mark.long)
        if any(f"{function}/".startswith((f"{place}/", f"{place}::")) for place in nightly):
            item.add_marker(pytest.mark.nightly)


def record(reports):
    """Write the list from pytest's reports. What was listed and has not run, as what it needs is
    not installed, stays."""
    listed = set(read(LONG))
    seconds = Counter()
    for report in reports:
        if report.when != "teardown" and not report.skipped:
            seconds[report.nodeid.partition("[")[0]] += report.duration
    long = {name for name, s in seconds.items() if s > LIMIT_S and not name.startswith(NEVER)}
    long |= listed - seconds.keys()
    LONG.write_text("".join(f"{name}\n" for name in sorted(long)), encoding="utf-8")


def read(path):
    return path.read_text(encoding="utf-8").splitlines()
