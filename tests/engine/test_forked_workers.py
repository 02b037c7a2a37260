"""Rollout workers forked from one process: it has one thread and all imports, and its death, or a
worker's, changes no bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.model.tiny import make_tiny
from tandem.runtime import numerics
from tandem.workers import host
from tests.support.working import all_idle, bits, groups, odd_workers, processes, run, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def parents(workers):
    return {parent(worker.pid) for worker in processes(workers)}


def command(pid):
    """Its arguments, which a fork has of its parent."""
    return tuple(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1])


def fork_server(workers):
    """The one process that has forked every worker, which this process has started."""
    [pid] = parents(workers)
    assert parent(pid) == os.getpid()
    return pid


def sample(workers):
    return [bits(completion) for completion in run(workers, groups(4))]


def forked(workers):
    return all_idle(workers) and os.getpid() not in parents(workers)


def test_a_worker_is_forked_by_the_one_process_that_forked_all_others():
    with odd_workers(count=2, restarts=1, idle=True) as workers:
        server, expected = fork_server(workers), sample(workers)
        assert len(os.listdir(f"/proc/{server}/task")) == 1
        assert {command(worker.pid) for worker in processes(workers)} == {command(server)}
        lost = processes(workers)[0]
        os.kill(lost.pid, signal.SIGKILL)
        until(workers, lambda: workers.restarts.used == 1 and all_idle(workers))
        assert processes(workers)[0].pid != lost.pid and fork_server(workers) == server
        assert sample(workers) == expected
        assert "it was ended by SIGKILL" in workers.reports[0]
    assert not Path(f"/proc/{server}").exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fork_server_that_is_killed_or_hangs_is_replaced(how, monkeypatch):
    if how == signal.SIGSTOP:  # it tells no end of a worker, and is not waited for
        monkeypatch.setattr(host, "EXIT_S", 0.5)
    with odd_workers(count=2, heartbeat_s=1.5, restarts=9, idle=True) as workers:
        server, expected = fork_server(workers), sample(workers)
        os.kill(server, how)
        if how == signal.SIGSTOP:  # it shows when a worker is needed
            assert sample(workers) == expected
            os.kill(processes(workers)[1].pid, signal.SIGKILL)
        assert sample(workers) == expected
        adopted = (server, 1)
        until(workers, lambda: forked(workers) and parents(workers).isdisjoint(adopted))
        assert fork_server(workers) != server and sample(workers) == expected
        if how == signal.SIGKILL:
            ended = f"process {server}, which had forked it, ended first: it was ended by SIGKILL"
            assert len(workers.reports) == 2 and all(ended in told for told in workers.reports)
        assert not Path(f"/proc/{server}").exists()


def test_replaced_fork_servers_leave_no_descriptor():
    with odd_workers(count=2, heartbeat_s=1.5, restarts=20) as workers:
        counts = []
        for _ in range(5):
            until(workers, lambda: all_idle(workers) and forked(workers))
            counts.append(len(os.listdir("/proc/self/fd")))
            os.kill(fork_server(workers), signal.SIGKILL)
            sample(workers)
        assert counts[-1] <= counts[1], counts  # the log of one that has ended may be held


def test_a_worker_that_waits_for_imports_lives_with_the_fork_server():
    """The import takes longer than a worker may be silent."""
    slow = {"fault": "slow import", "heartbeat_s": 2.0, "restarts": 2, "version": None}
    with odd_workers(**slow) as workers:
        [server] = {worker.pid for worker in processes(workers)}
        assert parent(server) == os.getpid()
        ends = time.monotonic() + 2.5
        while time.monotonic() < ends:
            workers.step()
        assert not workers.reports and not any(worker.ready for worker in processes(workers))
        os.kill(server, signal.SIGKILL)
        while len(workers.reports) < 2:
            workers.step()
        assert all("it was ended by SIGKILL" in told for told in workers.reports)
        workers.apply(0)
        assert sample(workers) and fork_server(workers) != server


def test_a_fork_server_with_a_second_thread_starts_every_worker_anew():
    with odd_workers(fault="thread", idle=True) as workers:
        assert len(os.listdir(f"/proc/{fork_server(workers)}/task")) == 2
        for worker in processes(workers):
            assert command(worker.pid)[-2:] == ("", f"{parent(worker.pid)}")
        sampled = sample(workers)
    with odd_workers() as workers:
        assert sampled == sample(workers)


LOADS = """
import json, os, sys
from tandem.rollout_workers import worker
worker.preload(sys.argv[1])
threads, before = len(os.listdir("/proc/self/task")), set(sys.modules)
worker.load_engine(dict(
    model_path=sys.argv[1], device="cpu", dtype="float32", splits=1, matmul="plain", threads=1,
    max_batch=4, cache_bytes=1 << 22, record_experts=False, trust_remote_code=False))
print(json.dumps([threads, sorted(set(sys.modules) - before)]))
"""


def test_imports_ahead_are_all_that_a_model_needs_and_start_no_thread(tmp_path):
    make_tiny(tmp_path, hidden=32, layers=1, intermediate=64)
    program = [sys.executable, "-c", LOADS, str(tmp_path)]
    environment = os.environ | numerics.environment()
    ended = subprocess.run(program, env=environment, capture_output=True, check=True)
    threads, modules = json.loads(ended.stdout)
    assert threads == 1
    assert [name for name in modules if name.startswith(("tandem", "torch", "transformers"))] == []
