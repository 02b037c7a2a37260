"""The `tandem` command in a process of its own, judged by exit code, output and imports."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The console script's entry point; a last line on stderr says whether torch was imported on the
# way.
ENTRY = """
import sys
from tandem.cli.main import run
try:
    run()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def tandem(*arguments, cwd):
    """(exit code, stdout, stderr, whether torch was imported)"""
    result = subprocess.run(
        [sys.executable, "-c", ENTRY, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env={
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "PATH": "/usr/bin:/bin",
            "COLUMNS": "200",
        },
    )
    *stderr, torch = result.stderr.splitlines()
    return result.returncode, result.stdout, "\n".join(stderr), torch == "True"


def assert_is_a_users_error(result, *words, torch):
    """Exit code 2, nothing on stdout, a told error and no traceback."""
    code, stdout, stderr, imported = result
    assert code == 2 and stdout == ""
    assert stderr.startswith("error: ") and "Traceback" not in stderr
    assert all(word in stderr for word in words), stderr
    assert imported == torch
