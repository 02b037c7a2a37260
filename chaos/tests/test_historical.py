"""The harness of historical bugs: it shows one that nothing stops, or another tripwire than its."""

from dataclasses import replace
from functools import partial

import numpy as np

from chaos.historical import BUGS, Bug, each, outcome, relayed, train


def test_at_least_25_bugs_have_names_of_their_own():
    assert len({bug.issue for bug in BUGS}) == len(BUGS) >= 25


def test_bug_that_nothing_stops_is_reported(tmp_path):
    harmless = Bug(
        issue="none", what="nothing", inject=partial(train, steps=2), stopped_by="something"
    )
    assert outcome(harmless, tmp_path / "run").problem == "nothing stopped it"


def test_bug_that_something_else_stops_is_reported(tmp_path):
    late = relayed(each(lambda c: replace(c, logprobs=np.roll(c.logprobs, 1))))
    bug = Bug(
        issue="none", what="", inject=lambda f, w: train(f, w, late), stopped_by="the journal"
    )
    assert outcome(bug, tmp_path / "run").problem.startswith("stopped by something else")
