"""Logs of processes on other nodes: what they write arrives, however they end. Without Ray."""

import signal
import subprocess
import sys

import pytest

from tandem.plugins.cluster.logs import LogFiles

WRITE = """
import sys
from tandem.plugins.cluster.logs import redirect_output
redirect_output(sys.argv[1])
{code}
"""


@pytest.fixture
def logs(tmp_path):
    return LogFiles(tmp_path / "workers")


def end_of(logs, name, code):
    path = logs.begin(name, "a")
    return subprocess.run([sys.executable, "-c", WRITE.format(code=code), path], check=False)


def test_the_last_words_of_a_killed_process_arrive(logs):
    code = "import os; os.write(2, b'so far\\n' * 9); os.kill(os.getpid(), 9)"
    assert end_of(logs, "trainer rank 1", code).returncode == -signal.SIGKILL
    assert logs.last_lines("trainer rank 1", 2) == "so far\nso far"
    text = (logs.folder / "trainer_rank_1.log").read_text()
    assert text.startswith("--- a process on a, ") and text.count("so far") == 9


def test_a_replaced_process_goes_on_in_the_file_and_is_quoted_alone(logs):
    end_of(logs, "rollout worker 0", "print('one')")
    end_of(logs, "rollout worker 0", "1 / 0")
    end_of(logs, "rollout worker 1", "pass")
    assert logs.last_lines("rollout worker 0", 9).endswith("ZeroDivisionError: division by zero")
    assert "one" not in logs.last_lines("rollout worker 0", 9)
    assert "one\n--- a process on a, " in logs.path("rollout worker 0").read_text()
    assert logs.last_lines("rollout worker 1", 9) == logs.last_lines("nobody", 9) == ""
