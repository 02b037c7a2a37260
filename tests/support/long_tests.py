"""Tests that take long, listed in tests/long.txt: `make test` leaves them out, `make check` and CI
run them.

`make long-tests` makes the list anew from the seconds of a whole run. Two files are never listed:
what nobody may change without seeing it at once.
"""

from collections import Counter
from pathlib import Path

import pytest

LIST = Path(__file__).parent.parent / "long.txt"
LIMIT_S = 1.5  # of a test function, with all its parameters and what it sets up
NEVER = ("tests/gpu/test_compiled_for_gpus.py", "tests/invariants/test_parity.py")


def mark(items):
    """Mark those of pytest's items that are listed."""
    listed = set(LIST.read_text(encoding="utf-8").splitlines())
    for item in items:
        if function_of(item.nodeid) in listed:
            item.add_marker(pytest.mark.long)


def record(reports):
    """Write the list from pytest's reports. What was listed and has not run, as what it needs is
    not installed, stays."""
    listed = set(LIST.read_text(encoding="utf-8").splitlines())
    seconds = Counter()
    for report in reports:
        if report.when != "teardown" and not report.skipped:
            seconds[function_of(report.nodeid)] += report.duration
    long = {name for name, s in seconds.items() if s > LIMIT_S and not name.startswith(NEVER)}
    long |= listed - seconds.keys()
    LIST.write_text("".join(f"{name}\n" for name in sorted(long)), encoding="utf-8")


def function_of(nodeid):
    return nodeid.partition("[")[0]
