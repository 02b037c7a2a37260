"""The `tandem` command line in this process, or some in one process of their own, judged by exit
code and output."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

from tandem.cli import main, progress

ROOT = Path(__file__).parents[2]
# Its last line on stdout has the result of each command and whether torch was there after it.
RUN_ALL = """
import json, sys
from tests.support.command import tandem
commands, cwd = json.loads(sys.argv[1])
print(json.dumps([(*tandem(*command, cwd=cwd), "torch" in sys.modules) for command in commands]))
"""


def tandem(*arguments, cwd):
    """(exit code, stdout, stderr)"""
    stdout, stderr = io.StringIO(), io.StringIO()
    before = sys.argv, signal.getsignal(signal.SIGTERM), os.environ.get("COLUMNS", "80")
    sys.argv, os.environ["COLUMNS"] = ["tandem", *map(str, arguments)], "200"
    progress.console.width = 200  # it may be older than the variable
    try:
        with chdir(cwd), redirect_stdout(stdout), redirect_stderr(stderr):
            main.run()
    except SystemExit as end:
        return end.code or 0, stdout.getvalue(), stderr.getvalue()
    finally:
        sys.argv, handler, os.environ["COLUMNS"] = before
        signal.signal(signal.SIGTERM, handler)
        main.gc.unfreeze()
    raise AssertionError("a command ends by sys.exit")


def in_own_process(*commands, cwd, **variables):
    """(exit code, stdout, stderr, whether torch was imported) of each command, one after another in
    a process of their own that has no other variables."""
    plan = json.dumps([[[str(word) for word in command] for command in commands], str(cwd)])
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, plan],
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_is_a_users_error(result, *words):
    """Exit code 2, nothing on stdout, one told error and no traceback."""
    code, stdout, stderr, *_ = result
    assert code == 2 and stdout == ""
    assert (
        stderr.startswith("error: ") and stderr.count("error:") == 1 and "Traceback" not in stderr
    )
    assert all(word in stderr for word in words), stderr


def started(program):
    """A process of this Python program, which has printed that it is ready."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], text=True, **pipes)
    assert process.stdout.readline() == "ready\n"
    return process
