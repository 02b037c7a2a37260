"""The pool under the watchdog: slow scores are no stall, an idle pool is none, and its workers say
where they hang."""

import os
import signal
import time

import pytest

from tandem.rewards.pool import THREAD, RewardPool
from tandem.runtime import watchdog
from tandem.runtime.processes import catches
from tandem.types import Attempt, Problem
from tests.support.waiting import WAIT_S, eventually

DEADLINE_S = 1.2
PROBLEM = Problem(uid="p/1", messages=({"role": "user", "content": "?"},), answer="")


@pytest.fixture
def pool(tmp_path):
    """Its processes write in the file "said"."""
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "def score(problem, completion):\n"
        "    time.sleep(float(completion))\n"
        "    return 1.0\n"
    )
    stderr = os.dup(2)
    with (tmp_path / "said").open("wb") as said:
        os.dup2(said.fileno(), 2)
    try:
        pool = RewardPool(f"{tmp_path}/slow.py:score", timeout_s=300.0)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    with pool:
        yield pool


def test_slow_scores_and_an_idle_pool_are_no_stall(pool):
    reports = []
    with watchdog.watching(DEADLINE_S, on_stall=reports.append):
        slow = pool.submit(PROBLEM, Attempt(text=str(1.5 * DEADLINE_S)))
        with watchdog.waiting_for(THREAD, "the last scores"):
            assert slow.result(WAIT_S).reward == 1.0
        for _ in range(12):
            time.sleep(DEADLINE_S / 10)
            watchdog.heartbeat()
    assert reports == []


def test_waiting_for_a_lost_score_is_reported_as_a_deadlock(pool):
    reports = []
    with watchdog.watching(DEADLINE_S, on_stall=reports.append):
        assert pool.submit(PROBLEM, Attempt(text="0")).result(WAIT_S).reward == 1.0
        with watchdog.waiting_for(THREAD, "a score that nobody makes"):
            assert eventually(lambda: reports)
    assert "a deadlock of `trainer` and `rewards`" in reports[0].partition("\n")[0]


def test_a_worker_says_where_it_is_when_it_is_asked(pool, tmp_path):
    pool.submit(PROBLEM, Attempt(text="1000"))

    def said():
        for worker in pool.workers:
            if worker.calls and catches(worker.pid, signal.SIGUSR1):
                os.kill(worker.pid, signal.SIGUSR1)
        return "in score" in (tmp_path / "said").read_text()

    assert eventually(said)
