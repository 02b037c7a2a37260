"""A reward: 1 if the answer is in the completion, less for every character. `reward = "examples/environments/reward.py:score"`"""


def score(problem, completion):
    return float(problem.answer in completion) - 0.001 * len(completion)
