"""Files that the tests leave behind are found (tests/support/leftovers.py), and end a session as a
failure."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LITTERING = """
import tempfile
from pathlib import Path

def test_tidy(tmp_path):
    (tmp_path / "mine").write_text("x")

def test_littering():
    Path(tempfile.gettempdir(), "left-here").write_text("x")
"""


def run(tmp_path, name):
    """The session of one of the tests above, with the conftest of these."""
    (tmp_path / "test_it.py").write_text(LITTERING)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "-k",
        name,
    ]
    alone = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")
    }
    return subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, env=alone
    )


def test_a_session_that_leaves_a_file_fails_and_names_it(tmp_path):
    found = run(tmp_path, "littering")
    assert found.returncode == 1 and "1 passed" in found.stdout
    assert "the tests left files behind" in found.stdout
    [left] = [line.strip() for line in found.stdout.splitlines() if line.endswith("left-here")]
    shutil.rmtree(Path(left).parent)  # such a session's folder stays, to be looked at
