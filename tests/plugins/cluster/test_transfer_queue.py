"""The stream through a real TransferQueue on a Ray cluster of this machine, which the tests of this
file share; the last ones kill its processes."""

import threading
from importlib.util import find_spec

import pytest

from tandem.config.schema import Config, Run, Stream
from tandem.plugins.cluster.rows import ARRAYS
from tandem.plugins.cluster.stream import START_S
from tandem.rollout.stream import MemoryStream
from tandem.runtime.errors import UserError
from tests.support.episodes import episodes_of
from tests.support.meshes import on_mesh
from tests.support.streams import (
    config_of,
    groups_to_learn,
    learn_through,
    through_memory_on,
    through_queue_on,
)
from tests.support.waiting import WAIT_S

needs_queue = pytest.mark.skipif(
    not (find_spec("transfer_queue") and find_spec("ray")),
    reason="pip install 'tandem-rl[transfer-queue]'",
)
CORRECTED = {"correction": "tis", "max_logprob_error": 1.2}


def nothing(groups):
    return ()


def everything(groups):
    places = [(row, n) for row, g in enumerate(groups) for n, _ in enumerate(g.episodes)]
    return [p for p in places if groups[p[0]].outcome == "train" and p != (4, 1)]


@pytest.fixture(scope="module")
def queue():
    """(servers, Ray's handles of them: the controller, then the storage units)"""
    from tandem.plugins.cluster.ray_cluster import open_ray
    from tandem.plugins.cluster.transfer_queue import start_servers

    with open_ray():
        yield start_servers(2, START_S)


@pytest.fixture
def stream(queue):
    from tandem.plugins.cluster.transfer_queue import TransferQueueStream

    stream = TransferQueueStream(queue[0], name="rank 0", capacity=1, timeout_s=WAIT_S)
    yield stream
    for step in list(stream._steps):
        stream.clear(step)
    stream.close()


def test_a_run_whose_transfers_have_no_time_is_refused():
    with pytest.raises(ValueError, match=r"run\.stall_s: must be at least 20"):
        Config(stream=Stream(kind="transfer_queue"), run=Run(stall_s=10.0))


@needs_queue
def test_processes_that_do_not_start_are_reported_with_the_reason(queue):
    from tandem.plugins.cluster.transfer_queue import start_servers

    with pytest.raises(UserError, match="TransferQueue did not start") as error:
        start_servers(2, 0.001)
    assert error.value.found.startswith("GetTimeoutError")


@needs_queue
def test_on_a_cluster_of_this_machine_it_listens_on_loopback(queue):
    servers, _ = queue
    assert all(one["ip"].startswith("127.") for one in servers)


@needs_queue
def test_groups_come_back_bit_by_bit_in_their_order(stream):
    groups = groups_to_learn()
    assert stream.put(0, groups) == []
    found = stream.take(0, [], everything)
    assert [g.outcome for g in found] == [g.outcome for g in groups]
    for row, group in enumerate(groups):
        for n, (episode, other) in enumerate(zip(group.episodes, found[row].episodes, strict=True)):
            assert (other.uid, other.reward) == (episode.uid, episode.reward)
            for name in ARRAYS:
                own, carried = getattr(episode, name), getattr(other, name)
                assert own.dtype == carried.dtype and own.shape == carried.shape
                if row != 1 and (row, n) != (4, 1):
                    assert own.tobytes() == carried.tobytes()


@needs_queue
def test_of_a_group_without_signal_no_array_is_stored(stream):
    stream.put(0, groups_to_learn())
    assert len(episodes_of(stream.take(0, [], nothing))) == 21
    with pytest.raises(UserError, match="TransferQueue has failed"):
        stream.take(0, [], lambda groups: [(1, 0)])


@needs_queue
def test_a_step_that_is_cleared_is_gone(stream):
    stream.put(0, groups_to_learn())
    stream.clear(0)
    with pytest.raises(UserError, match="no partition train_000001"):
        stream.take(0, [], nothing)


@needs_queue
@pytest.mark.parametrize("changes", [{"minibatches": 2}, CORRECTED], ids=["grpo", "corrected"])
def test_a_step_learns_the_same_bits_as_from_memory(stream, changes):
    groups, config = groups_to_learn(), config_of(**changes)
    assert learn_through(stream, groups, config) == learn_through(MemoryStream(), groups, config)


@needs_queue
def test_two_ranks_learn_the_same_bits_as_from_memory(queue):
    (rows, weights), _ = on_mesh(through_memory_on, CORRECTED, data=2)
    (found, same), (others, _) = on_mesh(through_queue_on, queue[0], CORRECTED, data=2)
    assert found == rows == others and same == weights


@needs_queue
def test_a_full_stream_waits_for_the_trainer_and_drops_nothing(stream):
    groups = groups_to_learn()
    stream.put(0, groups)
    second = threading.Thread(target=stream.put, args=(1, groups))
    second.start()
    second.join(0.5)
    assert second.is_alive() and len(stream.take(0, [], nothing)) == 7
    stream.clear(0)
    second.join(WAIT_S)
    assert not second.is_alive() and len(stream.take(1, [], nothing)) == 7


@needs_queue
def test_a_stream_that_stays_full_ends_with_an_error(queue):
    from tandem.plugins.cluster.transfer_queue import TransferQueueStream

    stream = TransferQueueStream(queue[0], name="full", capacity=1, timeout_s=WAIT_S)
    stream.put(7, groups_to_learn())
    stream.timeout_s = 0.5
    with pytest.raises(UserError, match="no room"):
        stream.put(8, groups_to_learn())
    stream.timeout_s = WAIT_S
    stream.clear(7)
    stream.close()
