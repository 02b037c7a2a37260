import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from chaos.deadlocks import DEADLOCKS, faults, run
from tandem.runtime import watchdog
from tandem.runtime.processes import descendants, state_of
from tandem.runtime.watchdog_process import SLACK_S, STACKS_S

DEADLINE_S = 0.6
PATIENCE_S = 60.0


class Recorder:
    """What is done instead of ending the process: the report is kept."""

    def __init__(self):
        self.reports = []
        self.told = threading.Event()

    def __call__(self, report):
        self.reports.append(report)
        self.told.set()

    @property
    def accusation(self):
        assert self.told.wait(PATIENCE_S)
        return self.reports[0].partition("\n")[0]


def in_thread(name, target):
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def start(program):
    """A process of the program; its first line of output has come."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def eventually(holds):
    until = time.monotonic() + PATIENCE_S
    while not (result := holds()) and time.monotonic() < until:
        time.sleep(0.02)
    return result


def test_what_hangs_is_named_and_ended_and_what_was_stopped_is_forgiven(tmp_path):
    """`make chaos` runs all deadlocks; these are the four ways in which a culprit is found. Side by
    side, as they take seconds each."""
    names = [
        "opposite_locks",
        "a_stopped_child",
        "a_call_in_c_that_keeps_the_interpreter",
        "a_child_that_never_answers",
    ]

    def found(name):
        (tmp_path / name).mkdir()
        return faults(DEADLOCKS[name], run(name, tmp_path / name))

    with ThreadPoolExecutor() as pool:
        stopped, deaf = (
            pool.submit(stopped_for_a_while),
            pool.submit(told_to_nobody, tmp_path / "log.txt"),
        )
        assert dict(zip(names, pool.map(found, names), strict=True)) == {name: [] for name in names}
        assert stopped.result() == (0, "ended\n", "")
        assert "`trainer` shows no sign of life" in deaf.result()


def stopped_for_a_while():
    """The exit code and what was said. Its guard was not stopped, and sees that it was."""
    process = start(f"""
        from tandem.runtime import watchdog
        with watchdog.watching({DEADLINE_S}), watchdog.waits(of="disk", what="a file"):
            print("ready", flush=True)
            input()
        print("ended")
    """)
    process.send_signal(signal.SIGSTOP)
    assert eventually(lambda: state_of(process.pid) == "T")
    time.sleep(DEADLINE_S + SLACK_S + STACKS_S + 2.0)
    process.send_signal(signal.SIGCONT)
    output, told = process.communicate("go on\n", timeout=PATIENCE_S)
    return process.returncode, output, told


def told_to_nobody(log):
    """The log of a process that hangs, and whose terminal takes nothing."""
    process = start(f"""
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
    assert process.wait(PATIENCE_S) == watchdog.EXIT_CODE
    process.communicate()
    return log.read_text()


def test_without_a_watchdog_nothing_is_kept():
    watchdog.beat()
    with watchdog.waits(of="rollouts", what="nothing"):
        assert watchdog._watchdog is None and "watchdog" not in {
            t.name for t in threading.enumerate()
        }


def test_an_actor_that_beats_and_who_waits_for_it_are_not_accused():
    stop, over = Recorder(), threading.Event()

    def work():
        while not over.wait(DEADLINE_S / 10):
            watchdog.beat()

    with watchdog.watching(DEADLINE_S, stop=stop):
        worker = in_thread("rollouts", work)
        with watchdog.waits(of="rollouts", what="the episodes of step 1"):
            time.sleep(3 * DEADLINE_S)
        over.set()
        worker.join()
    assert stop.reports == []


def test_the_begin_and_the_end_of_a_wait_are_signs_of_life():
    stop = Recorder()
    with watchdog.watching(DEADLINE_S, stop=stop):
        for _ in range(8):
            with watchdog.waits(of="disk", what="a file"):
                time.sleep(DEADLINE_S / 4)
    assert stop.reports == []


def test_the_innermost_wait_is_followed_and_the_outer_one_again_after_it(capfd):
    stop = Recorder()
    with (
        watchdog.watching(DEADLINE_S, stop=stop),
        watchdog.waits(of="reward workers", what="the last scores"),
        watchdog.waits(of="disk", what="the journal"),
    ):
        assert "`trainer` waits for `disk` (the journal), outside" in stop.accusation
    assert "waits for `reward workers` (the last scores) since" in stop.reports[0]
    assert stop.accusation in capfd.readouterr().err

    stop = Recorder()
    with (
        watchdog.watching(DEADLINE_S, stop=stop),
        watchdog.waits(of="reward workers", what="the last scores"),
    ):
        with watchdog.waits(of="disk", what="the journal"):
            pass
        assert "`trainer` waits for `reward workers` (the last scores), outside" in stop.accusation


def test_an_actor_that_nobody_waits_for_is_found_too_and_told_once():
    stop, over = Recorder(), threading.Event()

    def hang():
        watchdog.beat()
        over.wait()

    with watchdog.watching(DEADLINE_S, stop=stop):
        hanging = in_thread("rollouts", hang)
        while not stop.told.wait(DEADLINE_S / 10):
            watchdog.beat()
        time.sleep(2 * DEADLINE_S)
        over.set()
        hanging.join()
    assert "`rollouts` shows no sign of life, at " in stop.accusation and stop.accusation.endswith(
        ", hang"
    )
    assert len(stop.reports) == 1


def test_a_thread_that_ended_is_forgotten_where_nobody_waits_for_it():
    stop = Recorder()
    with watchdog.watching(DEADLINE_S, stop=stop):
        in_thread("rollouts", watchdog.beat).join()
        assert eventually(
            lambda: (
                [a.name for a in watchdog._watchdog._actors.values()] == ["trainer"]
                or watchdog.beat()
            )
        )
        for _ in range(15):
            time.sleep(DEADLINE_S / 10)
            watchdog.beat()
    assert stop.reports == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which process is the guard's")
def test_the_watchdog_goes_without_its_guard_and_leaves_nothing_behind():
    stop = Recorder()
    handler = signal.getsignal(signal.SIGUSR1)
    with watchdog.watching(DEADLINE_S, stop=stop):
        guard = watchdog._watchdog.guard.process
        assert guard.pid in {process.pid for process in descendants(os.getpid())}
        guard.kill()
        assert "`trainer` shows no sign of life" in stop.accusation
    assert not [t.name for t in threading.enumerate() if t.name == "watchdog"]
    assert guard.pid not in {process.pid for process in descendants(os.getpid())}
    assert signal.getsignal(signal.SIGUSR1) == handler


def test_the_guard_ends_with_a_process_that_is_killed():
    process = start("""
        import time
        from tandem.runtime import watchdog
        with watchdog.watching(100.0):
            print("ready", flush=True)
            time.sleep(100)
    """)
    [guard] = descendants(process.pid)
    process.kill()
    process.communicate()
    assert eventually(lambda: state_of(guard.pid) in ("", "Z"))


def test_a_process_gives_its_stacks_when_asked():
    process = start("""
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
