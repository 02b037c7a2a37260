"""A bug of the field in a small real run: it is stopped in its step, and what is no bug is not. The
rest: make chaos."""

from collections import Counter

import pytest

from chaos.historical import BUGS, CLEAN, Killed, Witness, clean_run, last_step, outcome, train
from tandem.step import learn_step
from tests.support.stages import config

# One of each kind of tripwire, and of those that only a run shows; the section `historical` has
# all.
QUICK = (
    "SkyRL #1680",
    "AReaL #1569",
    "nanochat #810",
    "verl #6501",
    "verl #7579",
    "open-instruct #1483",
    "slime #1918",
    "TRL #2617",
    "TRL #2046",
    "verl #7401",
    "OpenRLHF #1208",
    "transformers #34053",
)


@pytest.mark.parametrize("issue", QUICK)
def test_bug_of_the_field_is_stopped_in_its_step_with_its_cause(issue, tmp_path):
    [bug] = [bug for bug in BUGS if bug.issue == issue]
    ended = outcome(bug, tmp_path / "run")
    assert ended.problem == "" and ended.fired >= 0


@pytest.mark.parametrize("name", ["small microbatches", "partial rollouts, late, two turns"])
def test_clean_run_is_not_stopped_and_checks_have_looked(name, tmp_path):
    counts: Counter = Counter()
    assert clean_run(tmp_path / "run", CLEAN[name], 4, counts) == ""
    assert (
        last_step(tmp_path / "run") == 4
        and counts["episodes whole, labelled, of their problem and version"] == 4 * 6
    )
    assert counts["what was loaded is what was saved"] == 1


def test_run_killed_before_its_first_checkpoint_begins_anew(tmp_path):
    def killed(stages, batch):
        if batch.step == 2:
            raise Killed
        return learn_step(stages, batch)

    settings = config(run__save_every=3)
    with pytest.raises(Killed):
        train(tmp_path / "run", Witness(), settings=settings, learn=killed)
    assert last_step(tmp_path / "run") == 2
    train(tmp_path / "run", Witness(), settings=settings)
    assert last_step(tmp_path / "run") == 5
