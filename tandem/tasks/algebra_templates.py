"""Eight school-algebra templates at two levels: question, worked solution and answer of one
problem.

Every function draws its numbers from the generator it is handed and returns a Draft whose answer is
unique and well defined by the question alone. "easy" is terse, for a character-level model of under
a million parameters that learns it in seconds; "school" is for real language models. Knows nothing
of splits, seeds, files or rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import TypeVar

import numpy as np

T = TypeVar("T")
Draw = np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One problem.

    Example: Draft(question="(x+3)/4=2, x?", core="(x+3)/4=2", steps=("x+3=8",), answer="5")
    """

    question: str
    # the mathematics without its wording; two questions are the same problem when it is equal
    core: str
    steps: tuple[str, ...]  # the working, every line a true statement
    answer: str  # an integer or a reduced fraction


def _int(draw: Draw, low: int, high: int) -> int:
    """Uniform over low..high, both included."""
    return int(draw.integers(low, high + 1))


def _nonzero(draw: Draw, limit: int) -> int:
    """Uniform over -limit..limit without 0."""
    value = _int(draw, 1, 2 * limit)
    return value if value <= limit else limit - value


def _pick(draw: Draw, choices: tuple[T, ...]) -> T:
    return choices[_int(draw, 0, len(choices) - 1)]


# --- writing mathematics
# ------------------------------------------------------------------------------------------


def _plus(value: int, unit: str = "") -> str:
    """A later term of a sum: ' + 3', ' - 2x', or nothing for 0."""
    if value == 0:
        return ""
    size = "" if unit and abs(value) == 1 else str(abs(value))
    return f" {'-' if value < 0 else '+'} {size}{unit}"


def _times(value: int, unit: str) -> str:
    """A first term: '3x', 'x', '-x'."""
    return {1: unit, -1: f"-{unit}"}.get(value, f"{value}{unit}")


def _polynomial(coefficients: tuple[int, ...]) -> str:
    """Highest power first; the first coefficient is not 0."""
    top = len(coefficients) - 1
    units = [f"x^{top - i}" if top - i > 1 else "x" * (top - i) for i in range(top + 1)]
    later = (_plus(c, u) for c, u in zip(coefficients[1:], units[1:], strict=True))
    return _times(coefficients[0], units[0]) + "".join(later)


def _sum(values: list[int]) -> str:
    return str(values[0]) + "".join(f" {'-' if v < 0 else '+'} {abs(v)}" for v in values[1:])


def _tight(text: str) -> str:
    return text.replace(" ", "")


def _linear_steps(k: int, shift: int, right: Fraction) -> tuple[str, ...]:
    """How kx + shift = right is solved, the equation itself first; steps that change nothing are
    left out."""
    rest = right - shift
    steps = [
        f"{_times(k, 'x')}{_plus(shift)} = {right}",
        f"{_times(k, 'x')} = {rest}",
        f"x = {rest / k}",
    ]
    return tuple(dict.fromkeys(steps))


# --- easy: one small table look-up a line, no spaces, because every character is a token
# -----------------------------


def _easy(given: str, ask: str, steps: list[str], answer: int) -> Draft:
    question = f"{given}, {ask}?"
    return Draft(question=question, core=question, steps=tuple(steps), answer=str(answer))


def _easy_shift(draw: Draw) -> tuple[int, str]:
    """The term that five templates end in, so that they learn one small table of differences
    together."""
    shift = _nonzero(draw, 5)
    return shift, _tight(f"x{_plus(shift)}")


def easy_absolute_shift(draw: Draw) -> Draft:
    shift, inner = _easy_shift(draw)
    distance = _int(draw, 1, 9)
    return _easy(f"|{inner}|={distance}", "max x", [f"{inner}={distance}"], distance - shift)


def easy_arith_sequence(draw: Draw) -> Draft:
    first, step, n = _int(draw, 1, 6), _int(draw, 1, 4), _int(draw, 4, 6)
    shown = ",".join(str(first + i * step) for i in range(3))
    rise = (n - 1) * step
    return _easy(shown, f"term {n}", [f"{step}*{n - 1}+{first}", f"{rise}+{first}"], rise + first)


def easy_exponent_linear(draw: Draw) -> Draft:
    shift, inner = _easy_shift(draw)
    base, exponent = _pick(draw, _EASY_POWERS)
    return _easy(
        f"{base}^({inner})={base**exponent}", "x", [f"{inner}={exponent}"], exponent - shift
    )


_EASY_POWERS = ((2, 2), (2, 3), (2, 4), (2, 5), (3, 2), (3, 3), (4, 2), (5, 2), (6, 2), (7, 2))


def easy_fraction_linear(draw: Draw) -> Draft:
    shift, inner = _easy_shift(draw)
    under, right = _int(draw, 2, 4), _int(draw, 1, 3)
    return _easy(
        f"({inner})/{under}={right}", "x", [f"{inner}={under * right}"], under * right - shift
    )


def easy_linear_nested(draw: Draw) -> Draft:
    shift, inner = _easy_shift(draw)
    factor, value, rest = _int(draw, 2, 4), _int(draw, 1, 3), _int(draw, 1, 5)
    steps = [f"{factor}({inner})={factor * value}", f"{inner}={value}"]
    return _easy(f"{factor}({inner})+{rest}={factor * value + rest}", "x", steps, value - shift)


def easy_poly_remainder(draw: Draw) -> Draft:
    slope, at, constant = _int(draw, 2, 4), _int(draw, 1, 5), _int(draw, 1, 6)
    polynomial = _tight(_polynomial((slope, constant)))
    steps = [f"{slope}*{at}+{constant}", f"{slope * at}+{constant}"]
    return _easy(f"({polynomial})/(x-{at})", "rest", steps, slope * at + constant)


def easy_quadratic_root(draw: Draw) -> Draft:
    shift, inner = _easy_shift(draw)
    root = _int(draw, 1, 9)
    return _easy(f"({inner})^2={root**2}", "max x", [f"{inner}={root}"], root - shift)


def easy_system_combo(draw: Draw) -> Draft:
    shift, x, y = _int(draw, 1, 5), _int(draw, 1, 6), _int(draw, 1, 6)
    return _easy(f"x+{shift}={x + shift},y={y}", "x+y", [f"x={x}", f"{x}+{y}"], x + y)


# --- school: larger numbers, words, fractions
# ----------------------------------------------------------------------


def _school(
    draw: Draw, wordings: tuple[str, ...], core: str, steps: tuple[str, ...], answer: Fraction | int
) -> Draft:
    question = f"{_pick(draw, wordings).format(core)}\n{SCHOOL_FORMAT}"
    return Draft(question=question, core=core, steps=steps, answer=str(answer))


SCHOOL_FORMAT = (
    "End with a line 'Answer: <value>', where the value is an integer or a reduced fraction."
)
_SOLVE = ("Solve {} for x.", "Find the number x for which {}.", "What value of x satisfies {}?")
_LARGER = (
    "What is the larger solution of {}?",
    "The equation {} has two solutions. Find the larger one.",
)


def _whole(draw: Draw) -> bool:
    """Most answers are whole numbers; three in ten are whatever comes, mostly fractions."""
    return _int(draw, 1, 10) <= 7


def school_absolute_shift(draw: Draw) -> Draft:
    k, shift, x = _int(draw, 1, 5), _nonzero(draw, 30), _int(draw, -20, 40)
    distance = abs(k * x + shift) or k if _whole(draw) else _int(draw, 2, 90)
    core = f"|{_times(k, 'x')}{_plus(shift)}| = {distance}"
    return _school(
        draw,
        _LARGER,
        core,
        _linear_steps(k, shift, Fraction(distance)),
        Fraction(distance - shift, k),
    )


def school_arith_sequence(draw: Draw) -> Draft:
    first, step, n = _int(draw, -40, 60), _nonzero(draw, 25), _int(draw, 12, 60)
    second, rise = first + step, (n - 1) * step
    last = first + rise
    steps = (
        f"{_sum([second, -first])} = {step}",
        f"{n - 1} * {step} = {rise}",
        f"{_sum([first, rise])} = {last}",
    )
    wordings = (
        "An arithmetic sequence begins {}. What is term number " + f"{n}?",
        "The first terms of an arithmetic sequence are {}. Find term number " + f"{n}.",
    )
    draft = _school(draw, wordings, f"{first}, {second}, {second + step}", steps, first + rise)
    return Draft(
        question=draft.question, core=f"{draft.core}; {n}", steps=steps, answer=draft.answer
    )


def school_exponent_linear(draw: Draw) -> Draft:
    base, top = _pick(draw, ((2, 12), (3, 7), (5, 5), (6, 4), (7, 4), (10, 6)))
    exponent, k, x = _int(draw, 2, top), _int(draw, 1, 6), _int(draw, -5, 9)
    shift = exponent - k * x if _whole(draw) else _nonzero(draw, 15)
    core = f"{base}^({_times(k, 'x')}{_plus(shift)}) = {base**exponent}"
    steps = (f"{base**exponent} = {base}^{exponent}", *_linear_steps(k, shift, Fraction(exponent)))
    return _school(draw, _SOLVE, core, steps, Fraction(exponent - shift, k))


def school_fraction_linear(draw: Draw) -> Draft:
    k, under, right, x = (
        _int(draw, 1, 7),
        _int(draw, 2, 12),
        _nonzero(draw, 15),
        _int(draw, -15, 20),
    )
    shift = under * right - k * x if _whole(draw) else _nonzero(draw, 40)
    core = f"({_times(k, 'x')}{_plus(shift)})/{under} = {right}"
    product = Fraction(under * right)
    return _school(draw, _SOLVE, core, _linear_steps(k, shift, product), (product - shift) / k)


def school_linear_nested(draw: Draw) -> Draft:
    factor, shift, rest, x = (
        _int(draw, 2, 12),
        _nonzero(draw, 20),
        _nonzero(draw, 40),
        _int(draw, -15, 25),
    )
    total = factor * (x + shift) + rest if _whole(draw) else _int(draw, -60, 120)
    product = total - rest
    core = f"{factor}(x{_plus(shift)}){_plus(rest)} = {total}"
    steps = (
        f"{factor}(x{_plus(shift)}) = {product}",
        *_linear_steps(1, shift, Fraction(product, factor)),
    )
    return _school(draw, _SOLVE, core, steps, Fraction(product, factor) - shift)


def school_poly_remainder(draw: Draw) -> Draft:
    coefficients = (_int(draw, 1, 5), *(_int(draw, -9, 9) for _ in range(2)), _nonzero(draw, 15))
    at = _nonzero(draw, 5)
    values = [c * at ** (3 - i) for i, c in enumerate(coefficients)]
    wordings = ("What is the remainder when {}?", "Find the remainder when {}.")
    core = f"{_polynomial(coefficients)} is divided by x{_plus(-at)}"
    steps = (
        f"x = {at}",
        f"{_polynomial(coefficients)} = {_sum(values)}",
        f"{_sum(values)} = {sum(values)}",
    )
    return _school(draw, wordings, core, steps, sum(values))


def school_quadratic_root(draw: Draw) -> Draft:
    lead, top, other = _int(draw, 1, 4), _nonzero(draw, 12), _nonzero(draw, 12)
    lead, top = lead // gcd(lead, top), top // gcd(lead, top)
    if Fraction(top, lead) == other:
        other = -other  # two different roots, so that "larger" means something
    core = f"{_polynomial((lead, -lead * other - top, top * other))} = 0"
    roots = (Fraction(top, lead), Fraction(other))
    steps = (
        f"({_times(lead, 'x')}{_plus(-top)})(x{_plus(-other)}) = 0",
        f"x = {roots[0]} or x = {roots[1]}",
    )
    return _school(draw, _LARGER, core, steps, max(roots))


def school_system_combo(draw: Draw) -> Draft:
    x, y = _int(draw, -9, 15), _int(draw, -9, 15)
    a, b, c, d = _int(draw, 1, 7), _nonzero(draw, 7), _int(draw, 1, 7), _nonzero(draw, 7)
    if a * d == b * c:
        a += 1  # moves the determinant off 0, because d is not 0
    e, f, determinant = a * x + b * y, c * x + d * y, a * d - b * c
    core = f"{_equation(a, b, e)} and {_equation(c, d, f)}"
    steps = (
        _equation(a * d, b * d, e * d),
        _equation(c * b, b * d, f * b),
        *dict.fromkeys((f"{_times(determinant, 'x')} = {determinant * x}", f"x = {x}")),
        f"y = {y}",
    )
    return _school(
        draw, ("If {}, what is x + y?", "Find x + y, given that {}."), core, steps, x + y
    )


def _equation(a: int, b: int, right: int) -> str:
    return f"{_times(a, 'x')}{_plus(b, 'y')} = {right}"


# --- the table
# -----------------------------------------------------------------------------------------------------

NAMES = (
    "absolute_shift",
    "arith_sequence",
    "exponent_linear",
    "fraction_linear",
    "linear_nested",
    "poly_remainder",
    "quadratic_root",
    "system_combo",
)

EASY = (
    easy_absolute_shift,
    easy_arith_sequence,
    easy_exponent_linear,
    easy_fraction_linear,
    easy_linear_nested,
    easy_poly_remainder,
    easy_quadratic_root,
    easy_system_combo,
)

SCHOOL = (
    school_absolute_shift,
    school_arith_sequence,
    school_exponent_linear,
    school_fraction_linear,
    school_linear_nested,
    school_poly_remainder,
    school_quadratic_root,
    school_system_combo,
)

LEVELS: dict[str, dict[str, Callable[[Draw], Draft]]] = {
    "easy": dict(zip(NAMES, EASY, strict=True)),
    "school": dict(zip(NAMES, SCHOOL, strict=True)),
}
