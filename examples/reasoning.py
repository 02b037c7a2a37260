"""A verifier of reasoning-gym for a model that writes no `Answer:`: it is given the last number.

reward.function = "examples/reasoning.py:score"
"""

import re

from tandem.plugins.tasks.reasoning_gym import score as verify
from tandem.types import Problem


def score(problem: Problem, completion: str) -> float:
    numbers = re.findall(r"-?\d+", completion)
    return verify(problem, f"Answer: {numbers[-1]}") if numbers else 0.0
