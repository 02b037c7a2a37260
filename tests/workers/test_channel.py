"""The channel between a pool and its workers, whatever the other side writes."""

import os
import signal
import socket
import sys

import pytest

from tandem.workers.channel import Channel, ProtocolError
from tandem.workers.host import LocalHosts, LocalProcess
from tandem.workers.pool import RestartLimit

MAX_LINE = 1 << 20


@pytest.fixture
def ends():
    """A worker's blocking end and a pool's non-blocking one, which takes no descriptors."""
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    worker = Channel(theirs, MAX_LINE, max_descriptors=2)
    pool = Channel(ours, MAX_LINE)
    yield worker, pool
    worker.close()
    pool.close()


def test_messages_arrive_whole_and_in_order(ends):
    worker, pool = ends
    worker.send({"a": 1})
    worker.socket.sendall(b'{"b": 2}\n{"c"')
    assert list(pool.receive()) == [{"a": 1}, {"b": 2}]
    worker.socket.sendall(b": 3}\n")
    assert list(pool.receive()) == [{"c": 3}]
    assert list(pool.receive()) == []


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("line", [b"garbage\n", b"7\n", b"\xff\x00\n", b"[" * 9999 + b"\n"])
def test_garbage_is_an_error_after_what_came_before_it(ends, line):
    worker, pool = ends
    worker.socket.sendall(b'{"a": 1}\n' + line)
    received = pool.receive()
    assert next(received) == {"a": 1}
    with pytest.raises(ProtocolError, match="not a message"):
        next(received)


def test_the_end_is_an_error_after_what_came_before_it(ends):
    worker, pool = ends
    worker.send({"last": True})
    worker.close()
    received = pool.receive()
    assert next(received) == {"last": True}
    with pytest.raises(EOFError):
        next(received)
    pool.send({"to": "nobody"})


@pytest.mark.parametrize("end", [b"", b"\n"], ids=["endless", "whole"])
def test_a_line_that_is_too_long_is_an_error(ends, end):
    worker, pool = ends
    worker.socket.setblocking(False)
    worker.send_line(b"x" * (MAX_LINE + 1) + end)
    with pytest.raises(ProtocolError, match="more than 1 MiB"):
        while True:
            worker.flush()
            assert list(pool.receive()) == []


def test_a_full_socket_keeps_the_rest_for_a_later_flush(ends):
    worker, pool = ends
    messages = [{"number": number, "text": "x" * 100_000} for number in range(20)]
    for message in messages:
        pool.send(message)
    assert pool.has_unsent
    received = []
    while pool.has_unsent or len(received) < len(messages):
        pool.flush()
        received += worker.receive()
    assert received == messages


def test_a_descriptor_goes_to_the_worker_and_none_to_the_pool(ends):
    worker, pool = ends
    reader, writer = os.pipe()
    pool.send({"take": 1}, writer)
    assert list(worker.receive()) == [{"take": 1}]
    os.write(taken := worker.descriptors.popleft(), b"!")
    assert os.read(reader, 9) == b"!"
    before = set(os.listdir("/dev/fd"))
    worker.send({"take": 2}, taken)
    assert list(pool.receive()) == [{"take": 2}]
    assert not pool.descriptors and os.read(reader, 9) == b""
    assert set(os.listdir("/dev/fd")) <= before
    os.close(reader)


def test_the_restart_after_the_last_is_refused_until_a_reset():
    restarts = RestartLimit(2)
    assert [restarts.spend() for _ in range(4)] == [True, True, False, False]
    restarts.reset()
    assert restarts.spend() and restarts.used == 1


def test_worker_has_no_place_among_the_trainers_processes(monkeypatch):
    names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "NODE"]
    for name in names:
        monkeypatch.setenv(name, "1")
    code = f"import os, sys; sys.exit(str([name for name in {names} if name in os.environ]))"
    host = LocalProcess([sys.executable, "-c", code])
    assert host.how_it_ended() == "it ended with exit code 1"
    assert host.last_words() == "['NODE']"
    host.end()


def test_a_fork_server_that_was_killed_takes_further_requests():
    """Messages to it are lost, and its end is seen by who asks."""
    hosts = LocalHosts([sys.executable, "-m", "tandem.rewards.worker"], preload="{}", log=False)
    try:
        host = hosts.open(0)
        [server] = hosts._servers
        os.kill(server.pid, signal.SIGKILL)
        server.process.wait()
        assert host.pid and server.has_ended()
        host.end()
    finally:
        hosts.close()
