"""The rewards `answer`, `numeric` and `choice`, which read the final answer of a completion.

Knows neither processes nor weights.

    python -c "from tandem.plugins.graders.rewards import numeric; \
        from tandem.types import Problem; \
        print(numeric(Problem(uid='', messages=(), answer='3.14'), 'about 3.1', tolerance=0.1))"
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from tandem.plugins.graders.answer import TEXT_CHARS, extract, score
from tandem.plugins.graders.answer_numbers import Number, parse_number, written_numbers
from tandem.rewards.builtin import behind_thoughts
from tandem.rewards.parts import BadValue, checked_by
from tandem.types import Problem


def _import_ahead(_: Mapping[str, Any]) -> None:
    """Import what compares formulas once, for all workers and before any deadline."""
    import math_verify  # noqa: F401


@checked_by(_import_ahead)
@behind_thoughts
def answer(problem: Problem, completion: str) -> float:
    """Return 1 if the final answer is the ground truth, as number, list, text, choice or formula
    (answer.py)."""
    return score(completion, problem.answer)


@behind_thoughts
def numeric(
    problem: Problem, completion: str, *, tolerance: float = 1e-6, relative: float = 0.0
) -> float:
    """Return 1 if the final answer, else the last number of the completion, is near the ground
    truth: |number - truth| <= max(tolerance, relative x |truth|). 50% is 0.5. Compared as
    fractions."""
    parsed = parse_number(problem.answer)
    if parsed is None:
        raise _bad_answer(problem, "a number")
    final, truth = extract(completion), _value(parsed)
    if final is None:
        written = written_numbers(completion[-TEXT_CHARS:])[-1:]
    else:  # in an answer with words ("about 3.1 cm") the only number, as two are two guesses
        written = [final] if parse_number(final) else written_numbers(final)
    number = parse_number(written[0]) if len(written) == 1 else None
    if number is None:
        return 0.0
    allowed = max(Fraction(str(tolerance)), Fraction(str(relative)) * abs(truth))
    return float(abs(_value(number) - truth) <= allowed)


def _value(number: Number) -> Fraction:
    return number.value / 100 if number.percent else number.value


_CHOICE = re.compile(r"[(\[]?([A-Za-z])(?:[)\].:,]|\s|$)")


@behind_thoughts
def choice(problem: Problem, completion: str) -> float:
    """Return 1 if the chosen letter is the ground truth's: the letter of the final answer ("Answer:
    (B) 12"), else the last one in parentheses, else one alone in the last line."""
    truth = _CHOICE.match(problem.answer.strip())
    if truth is None:
        raise _bad_answer(problem, "a letter")
    text = completion[-TEXT_CHARS:]
    if (final := extract(text)) is not None:
        chosen = _CHOICE.match(re.sub(r"\\(?:text|mathrm|textbf)\{|[}$*_`]", "", final).strip())
        letter = chosen[1] if chosen else ""
    elif in_parentheses := re.findall(r"\(([A-Z])\)", text):
        letter = in_parentheses[-1]
    else:
        last = text.strip().rpartition("\n")[2].strip(" .*_`")
        letter = last if len(last) == 1 else ""
    return float(letter.upper() == truth[1].upper())


def _bad_answer(problem: Problem, expected: str) -> BadValue:
    return BadValue(
        f"the answer {problem.answer[:100]!r} of problem {problem.uid!r} is not {expected}"
    )
