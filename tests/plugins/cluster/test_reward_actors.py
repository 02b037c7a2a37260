"""Reward workers of a cluster: the scores of one machine, whoever dies, joins or leaves. Their
processes are real, on this machine and without Ray."""

import os
import signal
import threading
from contextlib import contextmanager

import pytest

from tandem.plugins.cluster.node_pool import RewardActors
from tandem.rewards.pool import RewardPool
from tandem.runtime.errors import UserError
from tandem.types import Attempt, Problem
from tandem.workers.pool import Limits
from tests.support.node_process import Nodes
from tests.support.scoring import FakeClock
from tests.support.waiting import WAIT_S, eventually

PROBLEM = Problem(uid="p/1", messages=({"role": "user", "content": "?"},), answer="")
REWARD = """
def score(problem, completion):
    if completion.startswith("raise"):
        raise ValueError(completion)
    return sum(map(ord, completion)) / 7
"""
TEXTS = [f"Answer: {number}" for number in range(30)] + ["raise no", "\ud800é", ""]


@contextmanager
def pool_of(folder, function="reward.py:score", most=2, heartbeat_s=WAIT_S, **options):
    """(RewardActors, Nodes, what was reported)."""
    if folder.exists():
        (folder / "reward.py").write_text(REWARD)
    nodes, reports = Nodes("reward"), []
    with RewardActors(
        nodes.spawn,
        pool={"functions": [function], "timeout_s": WAIT_S, "workers": 1},
        folder=str(folder),
        most=most,
        heartbeat_s=heartbeat_s,
        report=reports.append,
        **options,
    ) as pool:
        yield pool, nodes, reports


def submit(pool, texts):
    return [pool.submit(PROBLEM, Attempt(text=text)) for text in texts]


def scores(futures):
    return [future.result(WAIT_S) for future in futures]


RESTARTS = Limits().restarts


def test_scores_are_those_of_the_pool_on_one_machine(tmp_path):
    with pool_of(tmp_path, most=1) as (pool, *_):
        found = scores(submit(pool, TEXTS))
        [row] = pool.status()
    with RewardPool(f"{tmp_path / 'reward.py'}:score") as local:
        expected = scores(submit(local, TEXTS))
    assert [score.reward.hex() for score in found] == [score.reward.hex() for score in expected]
    assert [score.parts for score in found] == [score.parts for score in expected]
    assert [bool(score.error) for score in found] == [bool(score.error) for score in expected]
    assert row["role"] == "reward worker 0" and row["requests"] == len(TEXTS)


def test_a_stopped_worker_is_lost_and_its_calls_are_served_again(tmp_path):
    clock = FakeClock()
    with pool_of(tmp_path, clock=clock, heartbeat_s=5.0) as (pool, nodes, reports):
        scores(submit(pool, TEXTS[:1]))
        os.kill(nodes.hosts[0].pid, signal.SIGSTOP)
        futures = submit(pool, TEXTS[1:2])

        def passes():
            clock.advance(pool, 1.0)
            return reports

        assert eventually(passes)
        [score] = scores(futures)
    assert score.reward == sum(map(ord, TEXTS[1])) / 7 and len(nodes.hosts) == 2
    assert any("no sign of life" in text for text in reports)


def test_workers_that_die_before_they_score_are_an_error_that_names_the_last(tmp_path):
    with pool_of(tmp_path, most=1) as (pool, nodes, _):
        kills = threading.Thread(target=_kill_all, args=(nodes, RESTARTS + 1))
        kills.start()
        [future] = submit(pool, TEXTS[:1])
        with pytest.raises(UserError, match="lost in a row") as caught:
            future.result(WAIT_S)
        kills.join()
        assert "reward worker 0" in caught.value.found
        with pytest.raises(UserError, match="lost in a row"):
            submit(pool, TEXTS[:1])


def test_a_lost_node_with_all_workers_but_one_is_no_end(tmp_path):
    with pool_of(tmp_path, most=RESTARTS + 2) as (pool, nodes, _):
        kills = threading.Thread(target=_kill_all, args=(nodes, RESTARTS + 1))
        kills.start()
        [score] = scores(submit(pool, TEXTS[:1]))
        kills.join()
    assert score.reward == sum(map(ord, TEXTS[0])) / 7


def _kill_all(nodes, count):
    for number in range(count):
        assert eventually(lambda number=number: len(nodes.hosts) > number)
        os.kill(nodes.hosts[number].pid, signal.SIGKILL)


def test_a_node_without_the_working_directory_is_a_users_error(tmp_path):
    with (
        pool_of(tmp_path / "missing") as (pool, *_),
        pytest.raises(UserError, match="working directory"),
    ):
        scores(submit(pool, TEXTS[:1]))
