"""One Ray cluster for all tests of this folder: two nodes on this machine, which runs join."""

import os

import pytest

# as of tests/support/runs.py; waits while the run of gate.json has done as many steps as it may
REWARD = """
import json, time
from pathlib import Path

def read(path, otherwise):
    return json.loads(path.read_text()) if path.exists() else otherwise

def is_held():
    gate = read(Path(__file__).parent / "gate.json", {"run": "", "steps": 1})
    return read(Path(gate["run"]) / "status.json", {"step": 0})["step"] >= gate["steps"]

def score(problem, completion):
    while is_held():
        time.sleep(0.02)
    return float(sum(map(ord, completion)) % 2)
"""
# a run may be held as long as a test waits; nothing stalls meanwhile
HELD = ["reward.timeout_s=600", "run.stall_s=600"]


@pytest.fixture(scope="session")
def nodes():
    """ray_cluster.LocalNodes; skipped without Ray. Its token is in the environment meanwhile, as a
    user's would be."""
    pytest.importorskip("ray", reason="pip install 'tandem-rl[ray]'")
    from tandem.plugins.cluster.ray_cluster import local_nodes

    # the GPUs are in Ray's books alone
    with local_nodes(2, object_bytes=1 << 20, gpus=1) as local:
        assert os.environ["RAY_AUTH_MODE"] == "token"
        yield local


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """(folder, command): data, a tiny model and a recipe of six steps."""
    from tests.support.runs import prepare

    folder = tmp_path_factory.mktemp("cluster")
    command = prepare(folder, steps=6)
    (folder / "reward.py").write_text(REWARD)
    return folder, [*command, "run.save_every=6", "eval.every=6", *HELD]
