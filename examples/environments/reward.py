"""A reward: 1 if the completion ends with the answer, less for every character."""


def score(problem, completion):
    # with `in`, 17 would be paid where 7 is right
    right = completion.rstrip(" .").split()[-1:] == [problem.answer]
    return float(right) - 0.001 * len(completion)
