"""Countdown: reach a target from given numbers, each used once, with + - * /. The difficulty: how
many numbers.

    tandem generate countdown --difficulty 3 --count 400 --out train.jsonl
    python -c "from tandem.plugins.tasks.countdown import value_of; print(value_of('(1 + 5) * 4'))"

Every problem has a solution, which the row holds, and mostly more, so the checker computes the
written expression, as the calculator does: in fractions, and nothing is evaluated by Python. Knows
arithmetic. Does not know files, models or rewards.
"""

import re
from collections import Counter
from fractions import Fraction
from typing import Any

from tandem import registry
from tandem.plugins.tasks.calculator import evaluate
from tandem.plugins.tasks.generate import Generator, TaskProblem, drawn, randint
from tandem.rewards.builtin import behind_thoughts
from tandem.rewards.parts import BadValue
from tandem.types import Problem

LEVELS = [2, 3, 4, 5, 6]
HIGHEST, HIGHEST_TARGET = 20, 200
TEXT_CHARS = 2_000  # of the end of a completion

Term = tuple[int, str]  # (value, how it is written)


def _problem(rng: Generator, difficulty: int) -> TaskProblem:
    """Draw "Make 23 from 11,15,3, each once, with + - * /."; columns: {"numbers": [11, 15, 3],
    "solution": "(15-3)+11"}. Difficulty 2 has about 470 problems for training, 115 for tests."""
    while True:
        numbers = [randint(rng, 1, HIGHEST) for _ in range(difficulty)]
        target, text = _combine(rng, [(number, str(number)) for number in numbers])
        if target <= HIGHEST_TARGET and target not in numbers:
            break
    return TaskProblem(
        prompt=f"Make {target} from {','.join(map(str, numbers))}, each once, with + - * /.",
        answer=str(target),
        dedup_key=f"{target} from {sorted(numbers)}",
        columns={"numbers": numbers, "solution": text.removeprefix("(").removesuffix(")")},
    )


def _combine(rng: Generator, terms: list[Term]) -> Term:
    """Join two terms until one is left; every value on the way is a positive whole number."""
    while len(terms) > 1:
        first, second = (int(place) for place in rng.permutation(len(terms))[:2])
        rest = [term for place, term in enumerate(terms) if place not in (first, second)]
        one, other = terms[first], terms[second]
        (a, left), (b, right) = max(one, other), min(one, other)
        choices = [(a + b, f"({left}+{right})"), (a * b, f"({left}*{right})")]
        choices += [(a - b, f"({left}-{right})")] if a > b else []
        choices += [(a // b, f"({left}/{right})")] if a % b == 0 else []
        terms = [*rest, choices[randint(rng, 0, len(choices) - 1)]]
    return terms[0]


# ---------------------------------------------------------------- the checker

_SPELLINGS = {  # sign -> how models write it
    "": r"\left \right",
    "*": r"\times \cdot × · ⋅",
    "/": r"\div ÷",
    "-": "− –",
    "(": "[",
    ")": "]",
}
# a power, a division without rest, a sign before a number, a zero before one
_NO_TERM = re.compile(r"(?:^|[-+*/(]) *[-+*/]|\b0+[1-9]")
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


@behind_thoughts
def reward(problem: Problem, completion: str, *, use_all: bool = True) -> float:
    """Return 1 if the expression makes the target from the numbers, else 0.

    The numbers are metadata["numbers"] (or "nums"), the target metadata["target"], else the answer.
    The expression is the last <answer>...</answer>, else the final answer; `= 24` may follow it.
    use_all: every number once; else at most once. Raises BadValue for a problem without numbers.
    """
    metadata = problem.metadata
    given: Any = metadata.get("numbers", metadata.get("nums"))
    wanted = metadata.get("target", problem.answer)
    try:
        numbers, target = [int(number) for number in given], Fraction(str(wanted))
    except (TypeError, ValueError, ZeroDivisionError):
        found = f"numbers {given!r} and target {wanted!r}"[:200]
        raise BadValue(f"problem {problem.uid!r} has {found}, expected whole numbers") from None
    tagged = _TAGGED.findall(completion[-TEXT_CHARS:])
    extract = registry.find("extractors", "answer", key="reward.function")
    text = tagged[-1] if tagged else extract(completion) or ""
    for sign, spellings in _SPELLINGS.items():
        for spelling in spellings.split():
            text = text.replace(spelling, sign)
    value = value_of(text.strip(" \t\r\n$*_`.").partition("=")[0])
    if value is None or value[0] != target:
        return 0.0
    used, available = Counter(value[1]), Counter(numbers)
    return float(used == available if use_all else used <= available)


def value_of(text: str) -> tuple[Fraction, list[int]] | None:
    """Return the value of an expression of whole numbers, + - * / and parentheses, and its numbers.

    None for anything else, and for a division by zero.
    """
    if not re.fullmatch(r"[0-9+\-*/() ]+", text) or _NO_TERM.search(text):
        return None
    try:
        return evaluate(text), [int(number) for number in re.findall("[0-9]+", text)]
    except ValueError:
        return None


TASK = drawn("countdown", _problem, LEVELS)
