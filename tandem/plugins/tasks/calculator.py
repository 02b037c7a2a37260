"""Questions that need a calculator, "387*542=?", and the tool `calculator` that answers them.

    tandem generate calculator --difficulty 1 --count 400 --out train.jsonl
    python -c "from tandem.plugins.tasks.calculator import calculate; print(calculate('2/3 + 1.5'))"

The difficulty: how many numbers of how many digits; too hard for a model of a million parameters by
itself, and easy with the tool (`env = "tools"`).

The tool computes + - * / // % ** ^ and parentheses without `eval`. Every value is an exact fraction
of at most MAX_BITS, checked before it is computed, so that any expression takes microseconds.

Knows arithmetic. Does not know environments, files, models or rewards (`answer` fits).
"""

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
MAX_DEPTH = 20  # of parentheses and signs
MAX_BITS = 2048  # of a numerator or denominator

_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(\*\*|//|[-+*/%^()]))")
_LEVELS = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "**": 4, "^": 4}
_SIGN = 3  # -2**2 is -(2**2)
_SPELLINGS = str.maketrans("×÷−·", "*/-*")


async def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly.

    Args:
        expression: The expression, such as "12.5 * (3 + 4)".
    """
    return calculate(expression)  # no thread needed: see MAX_BITS


def calculate(expression: str) -> str:
    """Return the value as text: "7", "-5/3", and "0.75" if the expression has a decimal point and
    the value ends. Raises ValueError with words for the model."""
    if len(expression) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS} characters")
    parser = _Parser(_tokens(expression.translate(_SPELLINGS)))
    value = parser.value(0)
    if parser.tokens:
        raise ValueError(f"unexpected {parser.tokens[-1]!r}")
    return (_decimal(value) if "." in expression else None) or str(value)


def _tokens(text: str) -> list[str]:
    """Split an expression into tokens, the first one last."""
    tokens, at = [], 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"unexpected {text[at:].lstrip()[0]!r}")
        tokens.append(match[1] or match[2])
        at = match.end()
    return tokens[::-1]


class _Parser:
    """A precedence-climbing parser of tokens, the next one last."""

    def __init__(self, tokens: list[str]):
        self.tokens = tokens
        self.depth = 0

    def value(self, level: int) -> Fraction:
        """Compute the tokens up to the first operator that binds no tighter than level."""
        left = self._operand()
        while self.tokens and _LEVELS.get(self.tokens[-1], 0) > level:
            sign = self.tokens.pop()
            # powers group from the right
            right = self.value(_LEVELS[sign] - (sign in ("**", "^")))
            if sign in ("/", "//", "%") and right == 0:
                raise ValueError("division by zero")
            left = _bounded(Fraction(_OPERATORS[sign](left, right)))
        return left

    def _operand(self) -> Fraction:
        token = self.tokens.pop() if self.tokens else ""
        if token[:1].isdigit() or token.startswith("."):
            return _bounded(Fraction(token))
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} parentheses or signs")
        match token:
            case "+" | "-":
                inner = self.value(_SIGN)
                inner = -inner if token == "-" else inner
            case "(":
                inner = self.value(0)
                if not self.tokens or self.tokens.pop() != ")":
                    raise ValueError("a parenthesis is not closed")
            case _:
                raise ValueError(f"unexpected {token!r}" if token else "a number is missing")
        self.depth -= 1
        return inner


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("a power needs a whole exponent")
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    if base == 0 or abs(base) == 1:  # any exponent will do
        return Fraction(1) if exponent % 2 == 0 and (base or exponent == 0) else base
    # _bits counts up to one too many for each factor
    if _bits(base) * abs(exponent) > 2 * MAX_BITS:
        raise ValueError("the number is too large")
    return Fraction(base ** int(exponent))


_OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction | int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": _power,
    "^": _power,
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
