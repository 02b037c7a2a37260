"""Runs on a Ray cluster: the bits of a run in one process, whoever is killed.

The cluster is real, two nodes on this machine; so are the actors, the connections and the weights.
"""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.run_folder.status import read_status
from tests.support.command import in_own_process
from tests.support.gated import DEADLINE_S, gated, until
from tests.support.runs import fingerprint


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


def workers(folder, kind="rollout"):
    """The workers of a kind in the status of a run."""
    status = read_status(folder) or {"processes": []}
    return [row for row in status["processes"] if row["role"].startswith(f"{kind} worker")]


def joined(nodes, count=2):
    return [f"cluster.address={nodes.address}", "cluster.nodes=2", f"rollout.workers={count}"]


def test_a_run_on_two_nodes_has_the_bits_of_one_process(nodes, inputs, inline):
    folder, command = inputs
    spread = folder / "spread"
    with gated(spread) as allow, running(command, spread, *joined(nodes)):
        allow(1)
        seen = workers(spread)
        assert len(seen) == 2 and len({row["node"] for row in seen}) == 2
        allow(6)
    assert fingerprint(spread) == inline


def test_a_worker_that_needs_a_gpu_is_placed_on_a_node_of_this_machine_that_has_one(nodes):
    from tandem.plugins.cluster.ray_cluster import join_cluster

    with join_cluster(nodes.address, 2, gpus=1) as cluster:
        host = cluster.spawn(0)
        assert until(host.connect) is not None
        host.end()


# ---- bad input


def test_its_token_is_for_the_user_alone(nodes):
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert [path.stat().st_mode & 0o077 for path in (token, token.parent)] == [0, 0]


ENDS = """
import os
from tandem.plugins.cluster.this_machine import short_folder
from tandem.runtime.processes import kill_descendants

with short_folder() as folder:
    print(folder, flush=True)
    {end}
"""


@pytest.mark.parametrize(
    "end", ["kill_descendants(os.getpid()); os._exit(3)", "os.kill(os.getpid(), 9)", "pass"]
)
def test_the_folder_of_a_cluster_goes_however_its_process_ends(end):
    ended = subprocess.run([sys.executable, "-c", ENDS.format(end=end)], stdout=subprocess.PIPE)
    folder = Path(ended.stdout.decode().strip())
    assert folder.name.startswith("ray-")
    until(lambda: not folder.exists())


def test_nobody_at_the_address_is_a_users_error_soon(inputs):
    pytest.importorskip("ray", reason="pip install 'tandem-rl[ray]'")
    folder, command = inputs
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [*command[3:], f"cluster.address=127.0.0.1:{port}", "cluster.nodes=2"]
    arguments += ["rollout.workers=1", f"run.folder={folder / 'nobody'}"]
    [(code, _, stderr, _)] = in_own_process(arguments, cwd=folder, HF_HUB_OFFLINE="1")
    assert code == 2 and "Traceback" not in stderr
    assert "the Ray cluster cannot be joined" in stderr and f"127.0.0.1:{port}" in stderr
