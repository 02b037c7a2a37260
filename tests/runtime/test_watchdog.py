import _thread
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from chaos.deadlocks import DEADLOCKS, faults, run
from tandem.runtime import watchdog
from tests.support.command import started
from tests.support.waiting import WAIT_S, eventually

DEADLINE_S = 0.6


class Recorder:
    """Keeps the report instead of ending the process."""

    def __init__(self):
        self.reports = []
        self.reported = threading.Event()

    def __call__(self, report):
        self.reports.append(report)
        self.reported.set()

    @property
    def finding(self):
        assert self.reported.wait(WAIT_S)
        return self.reports[0].partition("\n")[0]


@pytest.fixture
def on_stall():
    recorder = Recorder()
    with watchdog.watching(DEADLINE_S, on_stall=recorder):
        yield recorder


def in_thread(name, target):
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def test_hang_is_named_and_ended(tmp_path):
    """`make chaos` runs all deadlocks; these are the four ways to find a culprit, side by side."""
    names = [
        "opposite_locks",
        "a_stopped_child",
        "a_call_in_c_that_keeps_the_interpreter",
        "a_child_that_never_answers",
    ]

    def found(name):
        (tmp_path / name).mkdir()
        return faults(DEADLOCKS[name], run(name, tmp_path / name), named_s=60.0)

    with ThreadPoolExecutor() as pool:
        log = pool.submit(hang_without_a_terminal, tmp_path / "log.txt")
        assert dict(zip(names, pool.map(found, names), strict=True)) == {name: [] for name in names}
        assert "`trainer` shows no sign of life" in log.result()


def hang_without_a_terminal(log):
    """Return the log of a process that hangs and whose terminal takes nothing."""
    process = started(f"""
        import os, threading
        from pathlib import Path
        from tandem.runtime import watchdog
        os.set_blocking(2, False)
        try:
            while True: os.write(2, bytes(65536))
        except BlockingIOError:
            os.set_blocking(2, True)
        with watchdog.watching({DEADLINE_S}, log=Path({str(log)!r})):
            print("ready", flush=True)
            threading.Event().wait()
    """)
    assert process.wait(WAIT_S) == watchdog.EXIT_CODE
    process.communicate()
    return log.read_text()


def test_live_actor_and_the_actor_waiting_for_it_are_not_blamed(on_stall):
    over = threading.Event()

    def work():
        while not over.wait(DEADLINE_S / 10):
            watchdog.heartbeat()

    worker = in_thread("rollouts", work)
    with watchdog.waiting_for("rollouts", "the episodes of step 1"):
        time.sleep(3 * DEADLINE_S)
    over.set()
    worker.join()
    assert on_stall.reports == []


def test_beginning_and_end_of_a_wait_are_signs_of_life(on_stall):
    for _ in range(8):
        with watchdog.waiting_for("disk", "a file"):
            time.sleep(DEADLINE_S / 4)
    assert on_stall.reports == []


def test_innermost_wait_is_followed(on_stall, capfd):
    outer = watchdog.waiting_for("reward workers", "the last scores")
    with outer, watchdog.waiting_for("disk", "the journal"):
        assert "`trainer` waits for `disk` (the journal), outside" in on_stall.finding
    assert "waits for `reward workers` (the last scores) since" in on_stall.reports[0]
    assert on_stall.finding in capfd.readouterr().err


def test_the_outer_wait_is_followed_when_the_inner_one_has_ended(on_stall):
    with watchdog.waiting_for("reward workers", "the last scores"):
        with watchdog.waiting_for("disk", "the journal"):
            pass
        assert "`trainer` waits for `reward workers` (the last scores), outside" in on_stall.finding


def test_stalled_actor_nobody_waits_for_is_reported_once(on_stall):
    over = threading.Event()

    def hang():
        watchdog.heartbeat()
        over.wait()

    hanging = in_thread("rollouts", hang)
    while not on_stall.reported.wait(DEADLINE_S / 10):
        watchdog.heartbeat()
    time.sleep(2 * DEADLINE_S)
    over.set()
    hanging.join()
    assert "`rollouts` shows no sign of life, at " in on_stall.finding
    assert on_stall.finding.endswith(", hang")
    assert len(on_stall.reports) == 1


def test_thread_that_python_has_not_started_is_the_trainer(on_stall):
    """Autograd's on a GPU: it waits in collectives, and nobody sees it end."""
    over, begun = threading.Event(), threading.Event()

    def wait():
        with watchdog.waiting_for("other ranks", "gradients"):
            begun.set()
            over.wait()

    _thread.start_new_thread(wait, ())
    begun.wait()
    assert on_stall.reported.wait(WAIT_S)
    over.set()
    assert "`trainer` waits for `other ranks` (gradients)" in on_stall.finding


def test_ended_thread_nobody_waits_for_is_forgotten(on_stall):
    def is_forgotten():
        watchdog.heartbeat()
        return [a.name for a in watchdog._watchdog._actors.values()] == ["trainer"]

    in_thread("rollouts", watchdog.heartbeat).join()
    assert eventually(is_forgotten)
    for _ in range(15):
        time.sleep(DEADLINE_S / 10)
        watchdog.heartbeat()
    assert on_stall.reports == []


def test_sigusr1_writes_the_stacks():
    process = started("""
        import time
        from tandem.runtime import watchdog
        def rest():
            print("ready", flush=True)
            time.sleep(100)
        with watchdog.watching(100.0):
            rest()
    """)
    process.send_signal(signal.SIGUSR1)
    lines = iter(process.stderr.readline, "")
    assert any("in rest" in line for line in lines)
    process.kill()
    process.communicate()
