"""Many attempts at once through a RewardPool, and the clock of its tests."""

import time

from tandem.types import Attempt
from tests.support.waiting import WAIT_S, eventually


class FakeClock:
    """The clock of a RewardPool, which stands still until a test moves it: nothing else runs out of
    time, however busy the machine is."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def advance(self, pool, seconds):
        self.now += seconds
        pool.wake()


def submit_all(pool, problem, texts):
    return [pool.submit(problem, Attempt(text=text)) for text in texts]


def score_all(pool, items):
    """One score for each (problem, text), in order."""
    futures = [pool.submit(problem, Attempt(text=text)) for problem, text in items]
    return [future.result() for future in futures]


def scores_of(pool, problem, texts):
    """One score for each text, in order."""
    return score_all(pool, [(problem, text) for text in texts])


def in_flight(pool):
    """(index of the task, text, index of the function) of what each worker scores."""
    calls = [(call, one.function) for one in pool.workers for call in list(one.calls.values())]
    return sorted((call.index, call.asked[1].text, function) for call, function in calls)


def time_out(pool, clock, hung, *, seconds, function=0):
    """Let these texts run out of time, in that function, whenever nothing else is in flight."""
    hung, struck = list(hung), []

    def only_hung():
        seen = in_flight(pool)
        idle = len(seen) < pool.most
        starting = any(not worker.ready for worker in pool.workers)
        if not seen or starting or (pool._todo and idle) or any(one in struck for one in seen):
            return None
        if any(text not in hung or at != function for _, text, at in seen):
            return None
        time.sleep(0.01)  # a task that is just being handed out shows by then
        return seen == in_flight(pool) and seen

    while hung:
        seen = eventually(only_hung)
        assert seen, f"in flight: {in_flight(pool)}, expected only {hung}"
        struck += seen
        for _, text, _ in seen:
            hung.remove(text)
        clock.advance(pool, seconds)


def scores_of_some_that_hang(pool, clock, problem, texts, hung, *, timeout_s):
    """Return one score for each text, as scores_of does, of which some hang until they run out of
    time."""
    futures = submit_all(pool, problem, texts)
    time_out(pool, clock, [text for text in texts if text in hung], seconds=timeout_s + 1)
    return [future.result(WAIT_S) for future in futures]
