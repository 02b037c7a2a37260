"""Logs of processes on other nodes: what they write arrives, however they end. Without Ray."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from tandem.plugins.cluster.logs import LogFiles
from tests.support.waiting import eventually

WRITE = """
import json, sys
from tandem.plugins.cluster.logs import redirect_output
redirect_output(json.loads(sys.argv[1]))
{code}
"""


@pytest.fixture
def logs(tmp_path):
    with closing(LogFiles("127.0.0.1", tmp_path / "workers")) as logs:
        yield logs


def end_of(logs, name, code):
    way = json.dumps(logs.expect(name, "a"))
    return subprocess.run([sys.executable, "-c", WRITE.format(code=code), way], check=False)


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


def test_a_process_without_the_token_writes_no_file(logs):
    way = logs.expect("trainer rank 1", "a")
    handshake = {**way["handshake"], "token": "0" * 64}
    with socket.create_connection(way["address"]) as connection:
        connection.sendall(json.dumps(handshake).encode() + b"\nlies\n")
        assert eventually(lambda: connection.recv(1) == b"")
    assert os.listdir(logs.folder) == []
