"""Countdown: reach a target from given numbers, each used once, with + - * /. The difficulty is how
many numbers.

    tandem generate countdown --difficulty 3 --count 400 --out train.jsonl

Every problem has a solution, which the row holds, and mostly more: a reward must work out what was
written. Knows arithmetic. Does not know files, models or rewards.
"""

from tandem.tasks.generate import Draft, Draw, Row, draw_rows, whole

LEVELS = [2, 3, 4, 5, 6]
HIGHEST, HIGHEST_TARGET = 20, 200

Term = tuple[int, str]  # (value, how it is written)


def rows(split: str, count: int, seed: int, difficulty: int) -> list[Row]:
    """count different problems, or all that there are: difficulty 2 has about 470 for training and
    115 for testing.

    Example row: {"uid": "countdown/3/train/0", "prompt": "Make 23 from 11,15,3, each once, with + -
    * /.", "answer": "23", "data_source": "countdown_3", "difficulty": 3, "numbers": [11, 15, 3],
    "solution": "(15-3)+11"}
    """
    return draw_rows("countdown", _draft, split, count, seed, difficulty, LEVELS)


def _draft(draw: Draw, difficulty: int) -> Draft:
    while True:
        numbers = [whole(draw, 1, HIGHEST) for _ in range(difficulty)]
        target, text = _combine(draw, [(number, str(number)) for number in numbers])
        if target <= HIGHEST_TARGET and target not in numbers:
            break
    core = f"{target} from {sorted(numbers)}"
    return Draft(
        prompt=f"Make {target} from {','.join(map(str, numbers))}, each once, with + - * /.",
        answer=str(target),
        side=core,
        core=core,
        columns={"numbers": numbers, "solution": text.removeprefix("(").removesuffix(")")},
    )


def _combine(draw: Draw, terms: list[Term]) -> Term:
    """Two terms become one until one is left; every value on the way is a positive whole number."""
    while len(terms) > 1:
        first, second = (int(place) for place in draw.permutation(len(terms))[:2])
        rest = [term for place, term in enumerate(terms) if place not in (first, second)]
        terms = [*rest, _pair(draw, terms[first], terms[second])]
    return terms[0]


def _pair(draw: Draw, one: Term, other: Term) -> Term:
    (a, left), (b, right) = max(one, other), min(one, other)
    choices = [(a + b, f"({left}+{right})"), (a * b, f"({left}*{right})")]
    choices += [(a - b, f"({left}-{right})")] if a > b else []
    choices += [(a // b, f"({left}/{right})")] if a % b == 0 else []
    return choices[whole(draw, 0, len(choices) - 1)]
