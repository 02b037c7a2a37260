"""1 for the very answer."""


def score(problem, completion):
    return float(completion.strip() == problem.answer)
