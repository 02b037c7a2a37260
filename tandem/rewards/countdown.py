"""The `countdown` reward: an expression that makes a target from given numbers, each used once.

Nothing is evaluated by Python: an expression of at most EXPRESSION_CHARS characters with + - * /
and parentheses is parsed, and computed in fractions. It knows one problem's numbers and text only.

    python -c "from tandem.rewards.countdown import value_of; print(value_of('(1 + 5) * 4'))"
"""

import ast
import re
from fractions import Fraction
from typing import Any

from tandem.rewards import answer
from tandem.rewards.parts import BadValue
from tandem.types import Problem

EXPRESSION_CHARS = 200

Value = tuple[Fraction, list[int]]  # what an expression is worth, and the numbers that it uses
_SIGNS = str.maketrans(
    {"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"}
)
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def countdown(problem: Problem, completion: str, *, use_all: bool = True) -> float:
    """1 if the expression makes the target from the numbers. use_all: every number once; else at
    most once.

    The numbers are metadata["numbers"] (or "nums"), the target metadata["target"], else the answer.
    The expression is the last <answer>...</answer>, else what follows the last `Answer:` or stands
    in the last box; `= 24` may follow it.
    """
    numbers, target = _read(problem)
    text = _expression(completion)
    found = value_of(text.partition("=")[0]) if text else None
    if found is None or found[0] != target:
        return 0.0
    left = list(numbers)
    for number in found[1]:
        if number not in left:
            return 0.0
        left.remove(number)
    return float(not (use_all and left))


def _read(problem: Problem) -> tuple[list[int], Fraction]:
    metadata = problem.metadata
    given: Any = metadata.get("numbers", metadata.get("nums"))
    try:
        return [int(number) for number in given], Fraction(
            str(metadata.get("target", problem.answer))
        )
    except (TypeError, ValueError, ZeroDivisionError):
        found = f"numbers {given!r} and target {metadata.get('target', problem.answer)!r}"
        raise BadValue(
            f"countdown: problem {problem.uid!r} has {found[:200]}, expected whole numbers"
        ) from None


def _expression(completion: str) -> str:
    tagged = _TAGGED.findall(completion[-answer.TEXT_CHARS :])
    text = tagged[-1] if tagged else answer.extract(completion) or ""
    for written, sign in (
        (r"\times", "*"),
        (r"\cdot", "*"),
        (r"\div", "/"),
        (r"\left", ""),
        (r"\right", ""),
    ):
        text = text.replace(written, sign)
    return text.translate(_SIGNS).strip(" \t\r\n$*_`.")


def value_of(text: str) -> Value | None:
    """Of whole numbers, + - * / and parentheses; None for anything else, and for a division by
    zero."""
    if len(text) > EXPRESSION_CHARS or not re.fullmatch(r"[0-9+\-*/() ]+", text):
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> Value | None:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number), [number]
        case ast.BinOp(
            left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as sign, right=right
        ):
            one, other = _value(left), _value(right)
            return (
                None
                if one is None or other is None
                else (_apply(sign, one[0], other[0]), one[1] + other[1])
            )
    return None  # among others a power, a sign before a number


def _apply(sign: ast.operator, one: Fraction, other: Fraction) -> Fraction:
    match sign:
        case ast.Add():
            return one + other
        case ast.Sub():
            return one - other
        case ast.Mult():
            return one * other
    return one / other
