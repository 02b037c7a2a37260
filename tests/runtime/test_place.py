"""The place of a process among those of a command: who gives it, and who must not have it."""

import os
import sys

import pytest

from tandem.runtime.place import PACKAGES, Place, here, place_from, share_of_threads, without_place

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "a",
}
SLURM = {  # 16 tasks on two nodes, without --ntasks-per-node
    "SLURM_PROCID": "9",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_NODELIST": "gpu[01-09]",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "712345",
    "SLURM_STEP_ID": "2",
}


def test_torchrun_gives_the_place():
    assert place_from(TORCHRUN) == Place(5, 8, 1, 4, "10.0.0.7", 1234, "a")
    assert place_from(SLURM | TORCHRUN) == place_from(TORCHRUN)


def test_slurm_gives_the_place():
    assert place_from(SLURM) == Place(9, 16, 1, 8, "gpu07", 22347, "712345.2", by_slurm=True)
    named = place_from(SLURM | {"MASTER_ADDR": "gpu08", "MASTER_PORT": "1234"})
    assert (named.address, named.port) == ("gpu08", 1234)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("a1,a2", "a1"), ("a[3,5]", "a3"), ("login,gpu[1-2]", "login")],
)
def test_first_host_of_slurm_has_rank_0(nodes, first):
    assert place_from(SLURM | {"SLURM_STEP_NODELIST": nodes}).address == first


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script without srun
        {"RANK": "1"},  # of something else
    ],
)
def test_a_process_that_nobody_placed_is_the_first_on_its_machine(environment):
    assert place_from(environment) is None
    assert here(environment, 4) == Place(0, 4, 0, 4, "127.0.0.1", 0)


def test_processes_that_it_starts_have_no_place_and_this_package(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/venv/bin", *sys.path])
    kept = {"PATH": "/bin", "SLURM_JOB_ID": "1", "OMP_NUM_THREADS": "1"}
    elastic = {"GROUP_RANK": "0", "ROLE_WORLD_SIZE": "8", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert without_place(kept | TORCHRUN | elastic) == kept
    monkeypatch.setattr(sys, "path", [PACKAGES, *sys.path])  # as `python -m tandem` in a clone
    assert without_place({"PYTHONPATH": "/more"}) == {"PYTHONPATH": f"{PACKAGES}{os.pathsep}/more"}


def test_processes_of_a_machine_share_its_threads():
    assert [share_of_threads(8, {}, size) for size in (1, 3, 16)] == [8, 2, 1]
    assert share_of_threads(8, TORCHRUN, 8) == 2
    assert share_of_threads(8, TORCHRUN | {"OMP_NUM_THREADS": "8"}, 8) == 8
    assert share_of_threads(8, SLURM, 16) == 8
