"""Questions that need a calculator, "387*542=?", and the tool `calculator` that answers them.

    tandem generate calculator --difficulty 1 --count 400 --out train.jsonl
    python -c "from tandem.plugins.tasks.calculator import calculate; print(calculate('2/3 + 1.5'))"

The difficulty: how many numbers of how many digits; too hard for a model of a million parameters by
itself, and easy with the tool (`env = "tools"`).

The tool computes + - * / // % ** ^ and parentheses without `eval`. Every value is an exact fraction
of at most MAX_BITS, checked before it is computed, so that any expression takes microseconds.

Knows arithmetic. Does not know environments, files, models or rewards (`answer` fits).
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from tandem.plugins.tasks.generate import Generator, TaskProblem, drawn, rand_digits, randint

# difficulty -> (digits, forms and their values)
FORMS: dict[int, tuple[int, dict[str, Callable[..., int]]]] = {
    1: (3, {"{}+{}": lambda a, b: a + b, "{}-{}": lambda a, b: a - b, "{}*{}": lambda a, b: a * b}),
    2: (
        3,
        {
            "{}*{}+{}": lambda a, b, c: a * b + c,
            "{}*{}-{}": lambda a, b, c: a * b - c,
            "{}+{}+{}": lambda a, b, c: a + b + c,
        },
    ),
    3: (
        4,
        {
            "({}+{})*{}": lambda a, b, c: (a + b) * c,
            "{}*{}+{}*{}": lambda a, b, c, d: a * b + c * d,
        },
    ),
}


def _problem(rng: Generator, difficulty: int) -> TaskProblem:
    """Draw "387*542=?", with the column "expression": "387*542"."""
    length, forms = FORMS[difficulty]
    form, value_of = list(forms.items())[randint(rng, 0, len(forms) - 1)]
    numbers = [rand_digits(rng, length) for _ in range(form.count("{}"))]
    expression = form.format(*numbers)
    return TaskProblem(
        prompt=f"{expression}=?",
        answer=str(value_of(*numbers)),
        # the same numbers in another order are the same problem
        dedup_key=f"{form} of {sorted(numbers)}",
        columns={"expression": expression},
    )


# ---------------------------------------------------------------- the tool

MAX_CHARS = 200
MAX_BITS = 2048  # of a numerator or denominator

_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")
_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*", "^": "**"})


async def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly.

    Args:
        expression: The expression, such as "12.5 * (3 + 4)".
    """
    return calculate(expression)  # no thread needed: see MAX_BITS


def calculate(expression: str) -> str:
    """Return the value as text: "7", "-5/3", and "0.75" if the expression has a decimal point and
    the value ends. Raises ValueError as `evaluate`."""
    value = evaluate(expression)
    return (_decimal(value) if "." in expression else None) or str(value)


def evaluate(expression: str) -> Fraction:
    """Compute an expression. Raises ValueError with words for the model."""
    if len(expression) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS} characters")
    text = " ".join(expression.translate(_SPELLINGS).split())
    if unknown := re.search(r"[^0-9.+*/%() -]", text):
        raise ValueError(f"unexpected {unknown[0]!r}")
    # as a text in parentheses a number keeps all digits, and none can follow another
    program = _NUMBER.sub(lambda number: f"('{number[0]}')", text)
    try:
        return _value(ast.parse(program, mode="eval").body)
    except SyntaxError:
        raise ValueError("it is no expression of numbers, operators and parentheses") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(str(digits)):
            return _bounded(Fraction(digits))
        case ast.UnaryOp(op, operand) if type(op) in _SIGNS:
            return _SIGNS[type(op)] * _value(operand)
        case ast.BinOp(left, op, right):
            return _bounded(Fraction(_OPERATORS[type(op)](_value(left), _value(right))))
    raise SyntaxError("a call")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("a power needs a whole exponent")
    # _bits counts up to one too many for each factor
    if base not in (-1, 0, 1) and _bits(base) * abs(exponent) > 2 * MAX_BITS:
        raise ValueError("the number is too large")
    return Fraction(base ** int(exponent))


_SIGNS: dict[type, int] = {ast.UAdd: 1, ast.USub: -1}
_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise ValueError("the number is too large")
    return value


def _decimal(value: Fraction) -> str | None:
    """Write 3/4 as "0.75" and 3 as "3"; None if the digits never end."""
    counts, rest = [], value.denominator
    for prime in (2, 5):
        counts.append(0)
        while rest % prime == 0:
            rest, counts[-1] = rest // prime, counts[-1] + 1
    if rest != 1:
        return None
    digits = max(counts)
    sign, text = "-" * (value < 0), str(abs(int(value * 10**digits))).rjust(digits + 1, "0")
    return sign + (f"{text[:-digits]}.{text[-digits:]}" if digits else text)


TASK = drawn("calculator", _problem, FORMS)
