"""The trainer's processes: where each finds its place, and who is named when one does not come;
`make chaos only=ranks` has the other faults and meshes."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from chaos.ranks import reserved_port, trial
from tandem.config.parallel import Parallel
from tandem.runtime.errors import UserError
from tandem.runtime.place import Place
from tandem.trainer.parallel.checks import check_mesh, own_gpu
from tandem.trainer.parallel.context import ContextParts
from tandem.trainer.parallel.mesh import make_mesh
from tandem.trainer.parallel.processes import LOOK_S, find_absent, join
from tests.support.meshes import CONTEXT, on_mesh
from tests.support.tiny import tiny_config
from tests.support.waiting import WAIT_S

TIMEOUT_S = 10.0  # a healthy process of a busy machine is not silent for so long
SHORT_S = 5.0  # nor an idle one for so long


# each with its victim and run.stall_s, 0 for its default
FAULTS = [
    ("killed", 1, 0.0),
    ("out of memory", 0, 0.0),
    ("hung beside its GPU", 1, 15.0),
    ("hung on its GPU", 2, 15.0),
]


def test_one_that_does_not_come_or_hangs_is_named():
    """Two at a time, as each of them waits."""

    def tried(case):
        fault, victim, stall_s = case
        return trial(fault, victim, at=7, timeout_s=TIMEOUT_S, stall_s=stall_s)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(tried, FAULTS)) == [(True, "")] * len(FAULTS)


def joins_late(rank, port):
    time.sleep(1.5 * SHORT_S * rank)
    with join(Place(rank, 2, rank, 2, "127.0.0.1", port), timeout_s=SHORT_S, stall_s=WAIT_S):
        time.sleep(3 * LOOK_S)


def test_one_that_comes_later_than_it_may_be_silent_is_alive_when_it_comes():
    with reserved_port() as port:
        processes = [CONTEXT.Process(target=joins_late, args=(rank, port)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(WAIT_S)
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]


def test_an_address_that_is_taken_is_one_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = Place(0, 2, 0, 2, "127.0.0.1", port)
        with pytest.raises(UserError) as caught, join(place, timeout_s=1.0, stall_s=1.0):
            pass
    assert caught.value.where == f"127.0.0.1:{port}" and "MASTER_PORT" in caught.value.next


def limits_on(mesh, stall_s):
    made = make_mesh(mesh.config, mesh.device, mesh.world.announce, stall_s)
    backends = [group.group._get_backend(mesh.device) for group in made.groups.values()]
    return {backend.options._timeout.total_seconds() for backend in backends}


def test_a_collective_fails_only_after_those_who_do_not_come_were_named():
    [limits] = on_mesh(limits_on, 500.0, data=1)
    assert min(limits) > 500.0


def test_a_size_that_divides_is_named():
    shape = tiny_config("qwen3", num_attention_heads=12, num_key_value_heads=6)
    with pytest.raises(UserError, match="equal shares") as caught:
        check_mesh(Parallel(context=4), shape)
    assert caught.value.next == "set parallel.context=3"
    with pytest.raises(UserError) as caught:
        check_mesh(Parallel(tensor=4), shape)
    assert caught.value.next == "set parallel.tensor=2"


def waiting(**ranks):
    return {
        int(name[1:]): [{"what": what, "ranks": of, "for_s": rest[0] if rest else 9.0}]
        for name, (what, of, *rest) in ranks.items()
    }


def test_who_is_not_in_the_oldest_collective_is_named_once_it_has_stalled():
    waits = waiting(r0=("a", [0, 1], 8.0), r1=("b", [1, 2], 9.0), r3=("an order", [0], 99.0))
    where = "`b`, where rank 1 waits,"
    assert find_absent(waits, 9.0) == ([2], where)
    waits[2] = []
    assert find_absent(waits, 9.0) == ([2], where)
    assert find_absent(waits, 10.0) == ([], "")
    assert find_absent(waiting(r3=("an order", [0])), 1.0) == ([], "")
    waits[2] = [{"what": "a", "ranks": [2, 3], "for_s": 1.0}, *waits[1]]  # its host and its GPU
    assert find_absent(waits, 9.0) == ([], "all of its ranks have been in `b` (1, 2)")


def test_each_process_of_a_machine_has_a_gpu_of_its_own():
    place = Place(3, 4, 3, 4, "", 0)
    assert own_gpu("cuda", place, 8) == 3
    for device, count in (("cuda", 3), ("cuda", 1), ("cuda:1", 8)):
        with pytest.raises(UserError, match="a GPU of its own"):
            own_gpu(device, place, count)
    assert own_gpu("cuda", Place(3, 4, 3, 4, "", 0, by_slurm=True), 1) == 0


def test_values_of_targets_come_in_the_order_of_the_targets():
    own = torch.tensor([10.0, 12.0], requires_grad=True)  # of process 0; of 1 they are 11 and 13
    of_both = torch.tensor([10.0, 12.0, 11.0, 13.0])
    pair = SimpleNamespace(rank=0, size=2, exchange=lambda *sent: of_both)
    batch = SimpleNamespace(tokens=np.zeros(64), rows=np.array([3, 40, 5, 50]))
    found = ContextParts(pair, torch.float32).gather(own, batch)
    (found * torch.arange(4.0)).sum().backward()
    assert found.tolist() == [10.0, 11.0, 12.0, 13.0] and own.grad.tolist() == [0.0, 2.0]
