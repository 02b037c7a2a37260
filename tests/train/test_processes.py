"""The trainer's processes: where each finds its place, and who is named when one does not come."""

import pytest

from chaos.ranks import named, trial
from tandem.config.parallel import Parallel
from tandem.runtime.errors import UserError
from tandem.train.parallel.checks import check_mesh, own_gpu
from tandem.train.parallel.processes import Place, find_circle, place_from
from tests.support.tiny import tiny_config


@pytest.mark.parametrize(
    ("fault", "victim"), [("killed", 1), ("out of memory", 0), ("out of step", 2), ("stopped", 0)]
)
def test_a_process_that_does_not_come_is_named(fault, victim):
    assert trial(fault, victim, at=7, timeout_s=3.0) == (True, "")


@pytest.mark.parametrize("dimension", ["tensor", "pipeline"])
def test_so_is_one_of_other_meshes(dimension):
    assert trial("killed", 1, at=7, timeout_s=3.0, mesh={dimension: 3}) == (True, "")


def test_a_number_in_a_text_is_no_name():
    assert not named("waits for 2 peer ranks\nranks 0 and 1 are out of step", 2)
    assert not named("rank 12 has given no sign of life", 1)
    assert named("ranks 0, 1 and 2 are out of step", 2)
    assert named("error: rank 2 has given no sign of life for 5 s", 2)


def test_a_size_that_divides_is_named():
    shape = tiny_config("qwen3", num_attention_heads=12, num_key_value_heads=6)
    with pytest.raises(UserError, match="equal shares") as caught:
        check_mesh(Parallel(context=4), shape)
    assert caught.value.next == "set parallel.context=3"
    with pytest.raises(UserError) as caught:
        check_mesh(Parallel(tensor=4), shape)
    assert caught.value.next == "set parallel.tensor=2"


def test_torchrun_gives_the_place():
    environment = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "1234",
    }
    assert place_from(environment) == Place(5, 8, 1, 4, "10.0.0.7", 1234)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[07-09,12]", "gpu07"),
        ("node1", "node1"),
        ("a1,a2", "a1"),
        ("a[3,5]", "a3"),
        ("login,gpu[1-2]", "login"),
    ],
)
def test_slurm_gives_the_place(nodes, first):
    environment = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "3",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_NODELIST": nodes,
    }
    assert place_from(environment) == Place(3, 8, 3, 4, first, 29500)


def test_a_process_that_nobody_placed_has_no_place():
    assert place_from({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_a_batch_script_of_slurm_without_srun_is_one_process():
    assert place_from({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None


def waiting(**ranks):
    return {int(name[1:]): {"what": what, "ranks": of} for name, (what, of) in ranks.items()}


def test_ranks_that_wait_for_each_other_in_different_collectives_are_out_of_step():
    two = waiting(r0=("loss", [0, 1]), r1=("norm", [0, 1]))
    assert find_circle(two) == (
        "ranks 0 and 1 are out of step: rank 0 waits for `loss`, rank 1 waits for `norm`"
    )
    mesh = waiting(r0=("a", [0, 1]), r1=("b", [1, 3]), r3=("a", [2, 3]), r2=("b", [0, 2]))
    assert find_circle(mesh).startswith("ranks 0, 1, 3 and 2 are out of step")


def test_ranks_that_wait_for_one_that_is_busy_are_in_step():
    assert find_circle(waiting(r0=("loss", [0, 1, 2]), r1=("loss", [0, 1, 2]))) == ""
    chain = waiting(r0=("a", [0, 1]), r1=("b", [1, 2]), r2=("c", [2, 3]))
    assert find_circle(chain) == ""


def test_each_process_of_a_machine_has_a_gpu_of_its_own():
    assert own_gpu("cuda", 3, 4, 8) == 3
    for device, count in (("cuda", 3), ("cuda:1", 8)):
        with pytest.raises(UserError, match="a GPU of its own"):
            own_gpu(device, 0, 4, count)
