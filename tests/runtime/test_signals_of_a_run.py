"""Small runs that are interrupted, once each way; chaos/leaving.py does it many times."""

import signal

import pytest

from chaos.leaving import InterruptedRuns


@pytest.fixture(scope="module")
def sync(tmp_path_factory):
    return InterruptedRuns(tmp_path_factory.mktemp("sync"), "sync", steps=4)


def test_interrupted_run_saves_and_resumes_to_the_same_bits(sync):
    assert sync.signal_after(2, signal.SIGTERM) == (True, "")
