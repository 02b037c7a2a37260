"""Waiting for what must come to hold, however busy the machine is: a test waits for a condition,
never for a while.

WAIT_S is how long until it is given up. It costs nothing when all is well, so it is far longer than
anything takes.
"""

import time

WAIT_S = 120.0


def eventually(holds, *, within_s=WAIT_S):
    """Tell whether it comes to hold."""
    deadline = time.monotonic() + within_s
    while not (result := holds()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return result


def given_time(run, holds, seconds):
    """Results of run(seconds), the last of which holds: ten times as many seconds each time, as
    long as it does not.

    For a limit that is to strike one thing after another has happened, which a busy machine may not
    even have begun.
    """
    results = [run(seconds)]
    while not holds(results[-1]) and seconds < WAIT_S:
        seconds *= 10
        results.append(run(seconds))
    return results
