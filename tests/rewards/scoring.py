"""Many attempts at once through a RewardPool, as the tests of it want them."""

from tandem.types import Attempt


def score_all(pool, items):
    """One score for each (problem, text), in order."""
    futures = [pool.submit(problem, Attempt(text=text)) for problem, text in items]
    return [future.result() for future in futures]


def scores_of(pool, problem, texts):
    """One score for each text, in order."""
    return score_all(pool, [(problem, text) for text in texts])
