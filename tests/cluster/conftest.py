"""One Ray cluster for all tests of this folder: two nodes on this machine, which runs join."""

import os

import pytest

# as of tests/support/runs.py; slow as long as there is a file that says so
REWARD = """
import time
from pathlib import Path

def score(problem, completion):
    if (Path(__file__).parent / "slow").exists():
        time.sleep(0.2)
    return float(sum(map(ord, completion)) % 2)
"""


@pytest.fixture(scope="session")
def nodes():
    """ray_cluster.LocalNodes; skipped without Ray. Its token is in the environment meanwhile, as a
    user's would be."""
    pytest.importorskip("ray", reason="pip install 'tandem-rl[ray]'")
    from tandem.cluster.ray_cluster import local_nodes

    with local_nodes(2, object_bytes=1 << 20) as local:
        assert os.environ["RAY_AUTH_MODE"] == "token"
        yield local


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """(folder, command): data, a tiny model and a recipe of four steps."""
    from tests.support.runs import prepare

    folder = tmp_path_factory.mktemp("cluster")
    command = prepare(folder, steps=6)
    (folder / "reward.py").write_text(REWARD)
    return folder, [*command, "run.save_every=6", "eval.every=6", "reward.timeout_s=30"]


@pytest.fixture(scope="session")
def inline(inputs):
    """Hashes of a run without workers."""
    from tests.support.runs import fingerprint, run

    folder, command = inputs
    run(command, folder / "inline")
    return fingerprint(folder / "inline")
