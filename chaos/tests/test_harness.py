"""The chaos harness: a section that hangs, fails or leaves something behind misses its bar."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from chaos.harness import Section, run_section
from chaos.results import Result, tally
from tandem.runtime.processes import descendants, started_at
from tests.support.faults import in_a_fork, memory_folder

GOOD = Result(what="good", injected=2, witnessed=2, survived=2, expected=2, seconds=0.1)
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def outcome_of(run, deadline_s, check, grace_s=60):
    """Run a section in a fork: its outcome must pass the check, and no process be left."""

    def alone():
        check(run_section(Section(name="section", run=run, deadline_s=deadline_s), grace_s))
        assert descendants(os.getpid()) == []

    assert in_a_fork(alone) == 0


def test_section_returns_its_rows():
    def check(outcome):
        assert outcome.rows == [GOOD] and outcome.met

    outcome_of(lambda: [GOOD], 60, check)


def test_section_past_its_deadline_is_ended_with_its_processes():
    def hang():
        subprocess.Popen(SLEEP, start_new_session=True).wait()

    def check(outcome):
        assert not outcome.met and "deadline of 3 s" in outcome.problem

    outcome_of(hang, 3, check)


def test_section_that_raises_misses_its_bar():
    def check(outcome):
        assert not outcome.met and "exit code 1" in outcome.problem

    outcome_of(lambda: [GOOD][1], 60, check)


@pytest.mark.parametrize(
    "leave", [lambda: subprocess.Popen(SLEEP, start_new_session=True), tempfile.mkdtemp]
)
def test_leftovers_of_a_section_are_named_and_removed(leave):
    def check(outcome):
        assert outcome.rows == [GOOD] and len(outcome.left) == 1 and not outcome.met
        assert outcome.left[0].startswith(("process", "file"))

    outcome_of(lambda: [leave(), GOOD][1:], 60, check, grace_s=0.2)


def test_process_that_ends_soon_is_not_a_leftover():
    def check(outcome):
        assert outcome.met, outcome.left

    outcome_of(lambda: [subprocess.Popen(["sleep", "0.3"]), GOOD][1:], 60, check)


def test_section_has_its_own_temporary_folder():
    def run():
        with memory_folder() as memory, tempfile.TemporaryDirectory() as folder:
            assert Path(folder).parent == memory.parent == Path(os.environ["TMPDIR"])
        return [GOOD]

    def check(outcome):
        assert outcome.met, outcome

    outcome_of(run, 60, check)


def test_bar_needs_every_fault_and_every_survival():
    assert tally("", [(True, ""), (True, "")]).met
    assert not tally("", [(True, ""), (False, "")]).met
    assert not tally("", [(True, ""), (True, "wrong")]).met
    assert not tally("", [(True, "")], at_least=2).met
    assert not tally("", []).met


def test_section_ends_with_a_killed_harness(tmp_path):
    def alone():
        os.environ["TMPDIR"], tempfile.tempdir = str(tmp_path), None
        harness = os.fork()
        if harness == 0:
            run_section(Section(name="section", run=lambda: time.sleep(600), deadline_s=600))
        section = wait_for(lambda: [process.pid for process in descendants(harness)])[0]
        os.kill(harness, signal.SIGKILL)
        os.waitpid(harness, 0)
        try:
            wait_for(lambda: not started_at(section))
        except AssertionError:
            os.kill(section, signal.SIGKILL)
            raise

    assert in_a_fork(alone) == 0


def wait_for(condition):
    until = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return value
