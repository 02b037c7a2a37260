"""Whole small runs that are told to leave, once each way; chaos/leaving.py does it many times."""

import signal

import pytest

from chaos.leaving import Left


@pytest.fixture(scope="module")
def sync(tmp_path_factory):
    return Left(tmp_path_factory.mktemp("sync"), "sync", steps=4)


def test_a_run_that_is_told_to_leave_saves_leaves_nothing_behind_and_goes_on_to_the_same_bits(sync):
    assert sync.signal_after(2, signal.SIGTERM) == (True, "")


def test_rollout_workers_end_with_a_run_that_is_told_to_leave(tmp_path):
    assert Left(tmp_path, "async with a worker", steps=4).signal_after(2, signal.SIGINT) == (
        True,
        "",
    )


def test_a_second_signal_ends_a_run_that_hangs_at_once(sync):
    assert sync.two_signals(signal.SIGINT) == (True, "")


def test_a_second_run_is_refused_and_named_the_first_and_the_lock_of_a_killed_one_is_taken_over(
    sync,
):
    assert sync.one_double() == (True, "")
