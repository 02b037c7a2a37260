"""A reward in a few lines: 1 when the last number of the completion is the answer.

reward.function = "examples/last_number.py:score"
"""

import re

from tandem.types import Problem


def score(problem: Problem, completion: str) -> float:
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and numbers[-1] == problem.answer)
