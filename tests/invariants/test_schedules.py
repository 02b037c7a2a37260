"""P1 over random lives of an engine: `make invariants` plays 1,000 of them, this a part."""

from hypothesis import HealthCheck, given, settings

from tests.support.schedules import Ask, Schedule, Step, Update, run, schedules


@given(schedules())
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_token_has_the_policys_logprob_in_every_schedule(schedule):
    gap, _, _ = run(schedule)
    assert gap == 0.0


def test_a_schedule_can_do_what_it_is_for():
    """Witness: preemption, shared beginnings and updates under running requests happen, and are
    survived."""
    acts = [
        Ask(7, 0, 4, 2),
        Step(3),
        Ask(6, 200, 3, 5),
        Step(4),
        Update(),
        Ask(4, 0, 2, 2),
        Step(8),
        Update(),
    ]
    gap, tokens, seen = run(Schedule("qwen3", 5, 8, 64, acts))
    assert gap == 0.0 and tokens > 100
    assert (
        seen["preemptions, those for new weights included"]
        and seen["prompt tokens found in the cache"]
    )
    assert seen["updates under running requests"] == 2
