"""Runs on a Ray cluster: the bits of a run in one process, whoever is killed, joins or leaves.

The cluster is real, two nodes on this machine; so are the actors, the connections and the weights.
"""

import json
import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest

from tandem.cluster.door import Door
from tandem.run_folder.status import read_status
from tests.support.command import assert_is_a_users_error, tandem
from tests.support.runs import fingerprint

DEADLINE_S = 240.0


@contextmanager
def running(command, folder, *overrides):
    """A run in a process of its own, which ends well."""
    with (folder.parent / f"{folder.name}.out").open("w+") as out:
        process = subprocess.Popen(
            [*command, f"run.folder={folder}", *overrides],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        try:
            yield process
            code = process.wait(DEADLINE_S)
            assert code == 0, (folder.parent / f"{folder.name}.out").read_text()
        finally:
            process.kill()
            process.wait()


def until(condition):
    ends = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < ends
        time.sleep(0.02)
    return found


def workers(folder):
    """The rollout workers in the status of a run."""
    status = read_status(folder) or {"processes": []}
    return [row for row in status["processes"] if row["role"].startswith("rollout worker")]


def step(folder):
    return (read_status(folder) or {"step": 0})["step"]


def joined(nodes):
    return [f"cluster.address={nodes.address}", "cluster.nodes=2", "rollout.workers=2"]


def test_a_run_on_two_nodes_has_the_bits_of_one_process(nodes, inputs, inline):
    folder, command = inputs
    with running(command, folder / "two", *joined(nodes)):
        until(lambda: step(folder / "two") >= 1)
        seen = workers(folder / "two")
    assert {row["node"] for row in seen} == {"127.0.0.2", "127.0.0.3"}
    assert fingerprint(folder / "two") == inline
    assert all(row["requests"] for row in workers(folder / "two"))


@contextmanager
def slow(folder):
    """Steps take some seconds each."""
    (folder / "slow").write_text("")
    try:
        yield
    finally:
        (folder / "slow").unlink()


def test_a_killed_actor_and_a_killed_node_change_no_bit(nodes, inputs, inline):
    folder, command = inputs
    struck, third = folder / "struck", nodes.add()
    with running(command, struck, *joined(nodes), "run.stall_s=120"), slow(folder):
        until(lambda: workers(struck) and step(struck) >= 1)
        os.kill(workers(struck)[0]["pid"], signal.SIGKILL)
        # it is replaced on the node that has no worker
        on_third = until(lambda: [w for w in workers(struck) if w["node"] == "127.0.0.4"])
        assert [w["restarts"] for w in on_third] == [1]
        nodes.remove(third)
        until(lambda: [w for w in workers(struck) if w["restarts"] == 2])
    assert fingerprint(struck) == inline
    log = (struck / "log.txt").read_text()
    assert "was lost while" in log and "restart 2 of 10" in log


def test_workers_join_and_leave_while_a_run_goes_on(inputs, inline):
    """Without Ray: `tandem scale` is the same for processes of one machine."""
    folder, command = inputs
    scaled = folder / "scaled"
    with running(command, scaled, "rollout.workers=1"), slow(folder):
        until(lambda: workers(scaled))
        assert tandem("scale", scaled, "rollout=3", cwd=folder)[0] == 0
        until(lambda: len(workers(scaled)) == 3)
        assert tandem("scale", scaled, "rollout=1", cwd=folder)[0] == 0
        code, output, _, torch = tandem("status", scaled, cwd=folder)
        assert code == 0 and "runs: pid" in output and "trainer rank 0" in output
        assert not torch
        until(lambda: len(workers(scaled)) == 1)
    assert fingerprint(scaled) == inline
    assert "does not run" in tandem("status", scaled, cwd=folder)[1]
    log = (scaled / "log.txt").read_text()
    assert "rollout workers: 1 -> 3" in log and "rollout workers: 3 -> 1" in log


def test_workers_join_on_a_cluster(nodes, inputs, inline):
    folder, command = inputs
    grown = folder / "grown"
    with running(command, grown, *joined(nodes)[:2], "rollout.workers=1"), slow(folder):
        until(lambda: workers(grown))
        assert tandem("scale", grown, "rollout=3", cwd=folder)[0] == 0
        until(lambda: len(workers(grown)) == 3)
    assert fingerprint(grown) == inline


# ---- bad input


def test_nobody_at_the_address_is_a_users_error_soon(inputs):
    pytest.importorskip("ray", reason="pip install 'tandem-rl[ray]'")
    folder, command = inputs
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [*command[3:], f"cluster.address=127.0.0.1:{port}", "cluster.nodes=2"]
    result = tandem(*arguments, "rollout.workers=1", f"run.folder={folder / 'nobody'}", cwd=folder)
    code, _, stderr, _ = result
    assert code == 2 and "Traceback" not in stderr
    assert "the Ray cluster cannot be joined" in stderr and f"127.0.0.1:{port}" in stderr


@pytest.mark.parametrize(
    "wish",
    ["rollout=0", "rollout=-1", "rollout=x", "4", "rollout=", "env=2", f"rollout={'9' * 5000}"],
)
def test_a_wish_that_is_no_number_of_workers_is_refused(tmp_path, wish):
    (tmp_path / "config.toml").write_text("")
    result = tandem("scale", tmp_path, wish, cwd=tmp_path)
    assert_is_a_users_error(result, "not a number of workers", wish, torch=False)


def test_only_a_run_that_lives_can_be_scaled(tmp_path):
    (tmp_path / "config.toml").write_text("")
    result = tandem("scale", tmp_path, "rollout=2", cwd=tmp_path)
    assert_is_a_users_error(result, "no process that runs it", torch=False)


@pytest.mark.parametrize("command", [("status",), ("scale", "rollout=2")])
def test_a_folder_without_a_run_is_refused(tmp_path, command):
    name, *wish = command
    result = tandem(name, tmp_path, *wish, cwd=tmp_path)
    assert_is_a_users_error(result, "not a run folder", str(tmp_path), torch=False)


def test_a_broken_status_is_a_users_error(tmp_path):
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "status.json").write_text('{"step": 1}')
    result = tandem("status", tmp_path, cwd=tmp_path)
    assert_is_a_users_error(result, "status.json", torch=False)


# ---- the door


@contextmanager
def door():
    opened = Door("127.0.0.1")
    try:
        yield opened
    finally:
        opened.close()


def knock(opened, line):
    """A connection that sends this line; whether the door has closed it."""
    with socket.create_connection(opened.address) as connection:
        connection.sendall(line)
        time.sleep(0.05)
        opened.open()
        connection.settimeout(0.2)
        try:
            return connection.recv(1) == b""
        except TimeoutError:
            return False


def test_the_door_takes_a_proved_connection_once():
    with door() as opened:
        taken = []
        greeting = opened.expect(lambda connection, message: taken.append((connection, message)))
        line = json.dumps({**greeting, "pid": 7}).encode() + b"\n"
        assert not knock(opened, line)
        assert [message["pid"] for _, message in taken] == [7]
        assert knock(opened, line) and len(taken) == 1
        taken[0][0].close()


@pytest.mark.parametrize(
    "forge",
    [
        lambda greeting: json.dumps({**greeting, "token": "0" * 64}).encode() + b"\n",
        lambda greeting: json.dumps({**greeting, "number": 99}).encode() + b"\n",
        lambda greeting: json.dumps({**greeting, "number": "0"}).encode() + b"\n",
        lambda greeting: json.dumps({"number": 0}).encode() + b"\n",
        lambda greeting: b"GET / HTTP/1.1\r\n\r\n",
        lambda greeting: b"x" * 10_000,
    ],
)
def test_the_door_closes_on_whoever_proves_nothing(forge):
    with door() as opened:
        taken = []
        greeting = opened.expect(lambda *both: taken.append(both))
        assert knock(opened, forge(greeting)) and not taken


def test_the_door_refuses_a_greeting_that_was_taken_back():
    with door() as opened:
        taken = []
        greeting = opened.expect(lambda *both: taken.append(both))
        opened.forget(greeting)
        assert knock(opened, json.dumps(greeting).encode() + b"\n") and not taken
