"""Sums and differences of whole numbers: "12+34-5=?". The difficulty: how many numbers of how many
digits.

    tandem generate arithmetic --difficulty 2 --count 400 --out train.jsonl

Knows arithmetic. Does not know files, models or rewards (`answer` fits).
"""

from tandem.plugins.tasks.generate import Generator, TaskProblem, drawn, rand_digits, randint

# difficulty -> (numbers, digits)
LEVELS = {1: (2, 1), 2: (2, 2), 3: (3, 2), 4: (3, 3), 5: (4, 3), 6: (5, 4)}


def _problem(rng: Generator, difficulty: int) -> TaskProblem:
    """Draw "12+34-50=?", with the column "terms": [12, 34, -50]. Difficulty 1 has about 100
    problems for training, 25 for tests."""
    numbers, length = LEVELS[difficulty]
    first, *rest = [rand_digits(rng, length) for _ in range(numbers)]
    terms = [first, *(number if randint(rng, 0, 1) else -number for number in rest)]
    return TaskProblem(
        prompt=f"{first}{''.join(f'{term:+d}' for term in terms[1:])}=?",
        answer=str(sum(terms)),
        dedup_key=f"{sorted(terms)}",  # 3+4 and 4+3 are one problem
        columns={"terms": terms},
    )


TASK = drawn("arithmetic", _problem, LEVELS)
