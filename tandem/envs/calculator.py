"""The built-in tool `calculator`: exact arithmetic of integers, decimals and fractions, without
`eval`.

    python -c "from tandem.envs.calculator import calculate; print(calculate('2/3 + 1.5 * 4'))"

+ - * / // % ** ^ and parentheses. Every value is an exact fraction of at most MAX_BITS, checked
before it is computed, so that any expression takes microseconds. Raises ValueError, with words that
a model can be told.
"""

import re
from collections.abc import Callable
from fractions import Fraction

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
    """The value as text: "7", "-5/3", and "0.75" where the expression has a decimal point and the
    value ends."""
    if len(expression) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS} characters")
    parser = _Parser(_tokens(expression.translate(_SPELLINGS)))
    value = parser.value(0)
    if parser.tokens:
        raise ValueError(f"unexpected {parser.tokens[-1]!r}")
    digits = _digits(value) if "." in expression else None
    return str(value) if digits is None else _decimal(value, digits)


def _tokens(text: str) -> list[str]:
    """The tokens, the first one last."""
    tokens, at = [], 0
    text = text.rstrip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"unexpected {text[at:].lstrip()[0]!r}")
        tokens.append(found[1] or found[2])
        at = found.end()
    return tokens[::-1]


class _Parser:
    """Precedence climbing."""

    def __init__(self, tokens: list[str]):
        self.tokens = tokens
        self.depth = 0

    def value(self, level: int) -> Fraction:
        """What follows, as far as its operators bind tighter than level."""
        left = self._operand()
        while self.tokens and _LEVELS.get(self.tokens[-1], 0) > level:
            operator = self.tokens.pop()
            # powers group from the right
            right = self.value(_LEVELS[operator] - (operator in ("**", "^")))
            left = _apply(operator, left, right)
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


def _apply(operator: str, left: Fraction, right: Fraction) -> Fraction:
    if operator in ("/", "//", "%") and right == 0:
        raise ValueError("division by zero")
    compute: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a / b,
        "//": lambda a, b: Fraction(a // b),
        "%": lambda a, b: a % b,
        "**": _power,
        "^": _power,
    }
    return _bounded(compute[operator](left, right))


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


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise ValueError("the number is too large")
    return value


def _digits(value: Fraction) -> int | None:
    """How many digits stand behind the decimal point; None where they never end."""
    counts, rest = [], value.denominator
    for prime in (2, 5):
        counts.append(0)
        while rest % prime == 0:
            rest, counts[-1] = rest // prime, counts[-1] + 1
    return max(counts) if rest == 1 else None


def _decimal(value: Fraction, digits: int) -> str:
    """0.75 with two digits is "0.75", 3 with none "3"."""
    sign, text = "-" * (value < 0), str(abs(int(value * 10**digits))).rjust(digits + 1, "0")
    return sign + (f"{text[:-digits]}.{text[-digits:]}" if digits else text)
