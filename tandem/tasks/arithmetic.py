"""Sums and differences of whole numbers: "12+34-5=?". The difficulty is how many numbers of how
many digits.

    tandem generate arithmetic --difficulty 2 --count 400 --out train.jsonl

Knows arithmetic. Does not know files, models or rewards (`answer` fits).
"""

from tandem.tasks.generate import Draft, Draw, Row, digits, draw_rows, whole

# difficulty -> (numbers, digits)
LEVELS = {1: (2, 1), 2: (2, 2), 3: (3, 2), 4: (3, 3), 5: (4, 3), 6: (5, 4)}


def rows(split: str, count: int, seed: int, difficulty: int) -> list[Row]:
    """count different problems, or all that there are: difficulty 1 has about 100 for training and
    25 for testing.

    Example row: {"uid": "arithmetic/3/train/0", "prompt": "12+34-50=?", "answer": "-4",
    "data_source": "arithmetic_3", "difficulty": 3, "terms": [12, 34, -50]}
    """
    return draw_rows("arithmetic", _draft, split, count, seed, difficulty, list(LEVELS))


def _draft(draw: Draw, difficulty: int) -> Draft:
    numbers, length = LEVELS[difficulty]
    first, *rest = [digits(draw, length) for _ in range(numbers)]
    terms = [first, *(number if whole(draw, 0, 1) else -number for number in rest)]
    text = str(first) + "".join(f"{term:+d}" for term in terms[1:])
    core = f"{sorted(terms)}"  # 3+4 and 4+3 are one problem
    return Draft(
        prompt=f"{text}=?", answer=str(sum(terms)), side=core, core=core, columns={"terms": terms}
    )
