"""Runs on a Ray cluster: the bits of a run in one process.

The cluster is real, two nodes on this machine; so are the actors, the connections and the weights.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.run_folder.status import read_status
from tests.support.command import tandem
from tests.support.gated import until
from tests.support.runs import fingerprint


def test_a_run_on_two_nodes_has_the_bits_of_one_process(nodes, inputs):
    folder, command = inputs
    alone, spread, sent = folder / "alone", folder / "spread", folder / "sent"
    joined = [f"cluster.address={nodes.address}", "cluster.nodes=2", "rollout.workers=2"]
    broadcast = [*joined, "weights.transport=collective"]
    for place, overrides in ((alone, []), (spread, joined), (sent, broadcast)):
        code, _, errors = tandem(*command[3:], f"run.folder={place}", *overrides, cwd=folder)
        assert code == 0, errors
    seen = [row for row in read_status(spread)["processes"] if row["role"].startswith("rollout")]
    assert len(seen) == 2 and len({row["node"] for row in seen}) == 2
    assert fingerprint(spread) == fingerprint(sent) == fingerprint(alone)


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
    code, _, stderr = tandem(*arguments, cwd=folder)
    assert code == 2 and "Traceback" not in stderr
    assert "the Ray cluster cannot be joined" in stderr and f"127.0.0.1:{port}" in stderr
