"""Several callers of one pool of rollout workers, each with its own version of the weights.
Processes without a model."""

import os
import signal
import threading
from contextlib import contextmanager

import pytest

from tandem.rollout_workers.client import Client
from tandem.runtime.errors import UserError
from tests.support.odd_worker import POISON
from tests.support.working import bits, expected_of, groups, odd_workers, processes, request, until
from tests.support.working import finish as finished


@contextmanager
def shared_pool(number=2, checks=False, **options):
    """A pool that its thread runs, and clients of it."""
    with odd_workers(version=None, **options) as workers:
        yield workers, [Client(workers._pool, n, checks=checks) for n in range(number)]


def finish(client, tickets, *others):
    return [bits(completion) for completion in finished(client, tickets, *others)]


def test_a_straggler_does_not_keep_the_next_versions_requests_waiting():
    with shared_pool(heartbeat_s=600.0) as (workers, (old, new)):
        old.apply(0)
        long = old.submit(request(1000))
        until(old, lambda: any(worker.tickets for worker in processes(workers)))
        [home] = [worker for worker in processes(workers) if worker.tickets]
        os.kill(home.pid, signal.SIGSTOP)
        new.apply(1)
        tickets = [new.submit(one) for one in groups(3)]
        assert finish(new, tickets) == expected_of(workers, 1, groups(3))
        assert long.completion is None and home.version == 0
        os.kill(home.pid, signal.SIGCONT)
        assert finish(old, [long]) == expected_of(workers, 0, [request(1000)])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_workers_gives_the_same_bits(count):
    with shared_pool(count=count) as (workers, (old, new)):
        for version, client in enumerate((old, new)):
            client.apply(version)
        tickets = [(old.submit(one), new.submit(one)) for one in groups(4)]
        olds, news = zip(*tickets, strict=True)
        assert finish(old, olds) == expected_of(workers, 0, groups(4))
        old.rest()
        assert finish(new, news) == expected_of(workers, 1, groups(4))
        assert workers.restarts.used == 0


def test_a_worker_killed_while_two_versions_run_changes_no_bit():
    with shared_pool(count=3, restarts=5) as (workers, (old, new)):
        for version, client in enumerate((old, new)):
            client.apply(version)
        olds = [old.submit(one) for one in groups(4, max_new_tokens=60)]
        news = [new.submit(one) for one in groups(4, max_new_tokens=60)]
        struck = set()
        for version, client in enumerate((old, new)):
            until(client, lambda v=version: serving(workers, v))
            victim = serving(workers, version)[0]
            struck.add(victim.pid)
            os.kill(victim.pid, signal.SIGKILL)
        whole = expected_of(workers, 0, groups(4, max_new_tokens=60))
        assert finish(old, olds, new) == whole
        old.rest()
        assert finish(new, news) == expected_of(workers, 1, groups(4, max_new_tokens=60))
        until(new, lambda: workers.restarts.used == len(struck))
        assert not struck & {worker.pid for worker in processes(workers)}


def serving(workers, version):
    return [one for one in processes(workers) if one.runs_target and one.version == version]


def test_a_worker_checks_its_completions_before_it_leaves_their_version():
    for fault, gap in (("none", 0.0), ("gap", 1e-6)):
        with shared_pool(checks=True, fault=fault) as (workers, (old, new)):
            old.apply(0)
            until(old, lambda w=workers: len(serving(w, 0)) == 2)
            finish(old, [old.submit(one) for one in groups(2)])
            old.rest()
            new.apply(1)
            finish(new, [new.submit(one) for one in groups(2)])
            until(new, lambda w=workers: len(serving(w, 1)) == 2)
            assert old.logprob_gap() == gap
            assert len(old._gaps) == 2
            assert new.logprob_gap() == gap and len(new._gaps) == 2


def test_a_worker_that_is_lost_in_its_check_is_left_out():
    with shared_pool(1, checks=True, fault="gap", restarts=1) as (workers, [client]):
        client.apply(0)
        until(client, lambda: len(serving(workers, 0)) == 2)
        victim = processes(workers)[0]
        os.kill(victim.pid, signal.SIGSTOP)
        killer = threading.Timer(0.3, os.kill, (victim.pid, signal.SIGKILL))
        killer.start()
        assert client.logprob_gap() == 1e-6 and workers.restarts.used == 1
        killer.join()


def test_an_error_of_the_pool_reaches_every_caller():
    with shared_pool(fault="poison", restarts=1) as (_, (old, new)):
        for version, client in enumerate((old, new)):
            client.apply(version)
        tickets = [old.submit(request(99, (POISON,))), new.submit(request(0))]
        for client in (old, new):
            with pytest.raises(UserError, match="again and again"):
                finish(client, tickets, old, new)
            with pytest.raises(UserError, match="again and again"):
                client.apply(1)


def test_a_rest_ends_with_the_next_request():
    with shared_pool(number=1) as (workers, [client]):
        client.apply(1)
        for _ in range(2):
            tickets = [client.submit(one) for one in groups(2)]
            assert finish(client, tickets) == expected_of(workers, 1, groups(2))
            client.rest()
            assert client.weight_version == -1
