"""Many attempts at once through a RewardPool, as the tests of it want them, and the clock that it
goes by."""

import time

from tandem.types import Attempt
from tests.support.waiting import WAIT_S, eventually


class Clock:
    """What the modules of a pool take for `time`. A test sets it forward, so that only what hangs
    runs out of time.

    A limit that were short enough to wait for would strike the innocent too, on a machine that
    stops for a moment.
    """

    clock_gettime = staticmethod(time.clock_gettime)

    def __init__(self):
        self.ahead = 0.0

    def monotonic(self):
        return time.monotonic() + self.ahead


def submit_all(pool, problem, texts):
    return [pool.submit(problem, Attempt(text=text)) for text in texts]


def score_all(pool, items):
    """One score for each (problem, text), in order."""
    futures = [pool.submit(problem, Attempt(text=text)) for problem, text in items]
    return [future.result() for future in futures]


def scores_of(pool, problem, texts):
    """One score for each text, in order."""
    return score_all(pool, [(problem, text) for text in texts])


def strike(pool, clock, hung, *, seconds, function=0):
    """Let the time of these texts run out, as soon as workers are at them, at that function, and at
    no other text."""

    def at():
        ahead = [
            (worker.at, list(worker.unanswered)[:1])
            for worker in list(pool._crew._workers.values())
        ]
        return sorted((item.attempt.text, number) for number, items in ahead for item in items)

    assert eventually(lambda: at() == sorted((text, function) for text in hung))
    clock.ahead += seconds
    pool._crew._ring()


def scores_of_some_that_hang(pool, clock, problem, texts, hung, *, timeout_s):
    """As scores_of; those that hang run out of time when all others have their scores."""
    futures = submit_all(pool, problem, texts)
    for future, text in zip(futures, texts, strict=True):
        if text not in hung:
            future.result(WAIT_S)
    strike(pool, clock, [text for text in texts if text in hung], seconds=timeout_s + 1)
    return [future.result(WAIT_S) for future in futures]
