"""The algebra data set: eight templates at two difficulties, 1 (easy) and 2 (school).

    tandem generate algebra --difficulty 2 --count 192 --out train.jsonl

Every template draws its numbers from a generator and returns a TaskProblem. The question alone
defines the one answer; the column `solution` holds the working, a true statement a line, and the
answer line. "easy" is terse, for a model of under a million parameters that learns it in
seconds; "school" is for real language models. Gives rows in verl's schema, and chats for a
supervised warm start. Knows nothing of models, tokens or rewards (`answer` fits).
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from math import gcd
from typing import TypeVar

from tandem.plugins.tasks.generate import (
    Generator,
    Row,
    Task,
    TaskProblem,
    check_request,
    first_new,
    generator_at,
    randint,
)

T = TypeVar("T")


def _nonzero(rng: Generator, limit: int) -> int:
    """Draw uniformly from -limit..limit without 0."""
    value = randint(rng, 1, 2 * limit)
    return value if value <= limit else limit - value


def _pick(rng: Generator, choices: tuple[T, ...]) -> T:
    return choices[randint(rng, 0, len(choices) - 1)]


def _problem(question: str, dedup_key: str, steps: Sequence[str], answer: object) -> TaskProblem:
    """Make a problem. steps: the working, true line by line. answer: integer or reduced
    fraction."""
    solution = "\n".join((*steps, f"Answer: {answer}"))
    return TaskProblem(
        prompt=question, answer=str(answer), dedup_key=dedup_key, columns={"solution": solution}
    )


# ---------------------------------------------------------------- writing mathematics


def _plus(value: int, unit: str = "") -> str:
    """Write a later term of a sum: ' + 3', ' - 2x', or nothing for 0."""
    if value == 0:
        return ""
    size = "" if unit and abs(value) == 1 else str(abs(value))
    return f" {'-' if value < 0 else '+'} {size}{unit}"


def _times(value: int, unit: str) -> str:
    """Write a first term: '3x', 'x', '-x'."""
    return {1: unit, -1: f"-{unit}"}.get(value, f"{value}{unit}")


def _polynomial(coefficients: tuple[int, ...]) -> str:
    """Write a polynomial, highest power first; the first coefficient is not 0."""
    top = len(coefficients) - 1
    units = [f"x^{top - i}" if top - i > 1 else "x" * (top - i) for i in range(top + 1)]
    later = (_plus(c, u) for c, u in zip(coefficients[1:], units[1:], strict=True))
    return _times(coefficients[0], units[0]) + "".join(later)


def _sum(values: list[int]) -> str:
    return str(values[0]) + "".join(f" {'-' if v < 0 else '+'} {abs(v)}" for v in values[1:])


def _tight(text: str) -> str:
    return text.replace(" ", "")


def _linear_steps(k: int, shift: int, right: Fraction) -> tuple[str, ...]:
    """List the steps that solve kx + shift = right, the equation first, without steps that change
    nothing."""
    rest = right - shift
    steps = [
        f"{_times(k, 'x')}{_plus(shift)} = {right}",
        f"{_times(k, 'x')} = {rest}",
        f"x = {rest / k}",
    ]
    return tuple(dict.fromkeys(steps))


# ---------------------------------------------------------------- easy
# One small table look-up a line, and no spaces, so that a line is few tokens.


def _easy(condition: str, ask: str, steps: list[str], answer: int) -> TaskProblem:
    question = f"{condition}, {ask}?"
    return _problem(question, question, steps, answer)


def _easy_shift(rng: Generator) -> tuple[int, str]:
    """Draw a shift and its term. Five templates end in it, so that a model learns one small table
    of differences for all of them."""
    shift = _nonzero(rng, 5)
    return shift, _tight(f"x{_plus(shift)}")


def easy_absolute_shift(rng: Generator) -> TaskProblem:
    shift, inner = _easy_shift(rng)
    distance = randint(rng, 1, 9)
    return _easy(f"|{inner}|={distance}", "max x", [f"{inner}={distance}"], distance - shift)


def easy_arith_sequence(rng: Generator) -> TaskProblem:
    first, step, n = randint(rng, 1, 6), randint(rng, 1, 4), randint(rng, 4, 6)
    shown = ",".join(str(first + i * step) for i in range(3))
    rise = (n - 1) * step
    return _easy(shown, f"term {n}", [f"{step}*{n - 1}+{first}", f"{rise}+{first}"], rise + first)


def easy_exponent_linear(rng: Generator) -> TaskProblem:
    shift, inner = _easy_shift(rng)
    base, exponent = _pick(rng, _EASY_POWERS)
    return _easy(
        f"{base}^({inner})={base**exponent}", "x", [f"{inner}={exponent}"], exponent - shift
    )


_EASY_POWERS = ((2, 2), (2, 3), (2, 4), (2, 5), (3, 2), (3, 3), (4, 2), (5, 2), (6, 2), (7, 2))


def easy_fraction_linear(rng: Generator) -> TaskProblem:
    shift, inner = _easy_shift(rng)
    under, right = randint(rng, 2, 4), randint(rng, 1, 3)
    return _easy(
        f"({inner})/{under}={right}", "x", [f"{inner}={under * right}"], under * right - shift
    )


def easy_linear_nested(rng: Generator) -> TaskProblem:
    shift, inner = _easy_shift(rng)
    factor, value, rest = randint(rng, 2, 4), randint(rng, 1, 3), randint(rng, 1, 5)
    steps = [f"{factor}({inner})={factor * value}", f"{inner}={value}"]
    return _easy(f"{factor}({inner})+{rest}={factor * value + rest}", "x", steps, value - shift)


def easy_poly_remainder(rng: Generator) -> TaskProblem:
    slope, at, constant = randint(rng, 2, 4), randint(rng, 1, 5), randint(rng, 1, 6)
    polynomial = _tight(_polynomial((slope, constant)))
    steps = [f"{slope}*{at}+{constant}", f"{slope * at}+{constant}"]
    return _easy(f"({polynomial})/(x-{at})", "rest", steps, slope * at + constant)


def easy_quadratic_root(rng: Generator) -> TaskProblem:
    shift, inner = _easy_shift(rng)
    root = randint(rng, 1, 9)
    return _easy(f"({inner})^2={root**2}", "max x", [f"{inner}={root}"], root - shift)


def easy_system_combo(rng: Generator) -> TaskProblem:
    shift, x, y = randint(rng, 1, 5), randint(rng, 1, 6), randint(rng, 1, 6)
    return _easy(f"x+{shift}={x + shift},y={y}", "x+y", [f"x={x}", f"{x}+{y}"], x + y)


# ---------------------------------------------------------------- school
# Larger numbers, words, fractions.


def _school(
    rng: Generator,
    wordings: tuple[str, ...],
    formula: str,
    steps: Sequence[str],
    answer: Fraction | int,
    more_key: str = "",
) -> TaskProblem:
    """Make a problem. formula fills in a wording, and is, with more_key, the problem's
    dedup_key."""
    question = f"{_pick(rng, wordings).format(formula)}\n{SCHOOL_FORMAT}"
    return _problem(question, formula + more_key, steps, answer)


SCHOOL_FORMAT = (
    "End with a line 'Answer: <value>', where the value is an integer or a reduced fraction."
)
_SOLVE = ("Solve {} for x.", "Find the number x for which {}.", "What value of x satisfies {}?")
_LARGER = (
    "What is the larger solution of {}?",
    "The equation {} has two solutions. Find the larger one.",
)


def _is_whole(rng: Generator) -> bool:
    """Decide whether to make the answer whole: seven in ten are, the rest are mostly fractions."""
    return randint(rng, 1, 10) <= 7


def school_absolute_shift(rng: Generator) -> TaskProblem:
    k, shift, x = randint(rng, 1, 5), _nonzero(rng, 30), randint(rng, -20, 40)
    distance = abs(k * x + shift) or k if _is_whole(rng) else randint(rng, 2, 90)
    formula = f"|{_times(k, 'x')}{_plus(shift)}| = {distance}"
    return _school(
        rng,
        _LARGER,
        formula,
        _linear_steps(k, shift, Fraction(distance)),
        Fraction(distance - shift, k),
    )


def school_arith_sequence(rng: Generator) -> TaskProblem:
    first, step, n = randint(rng, -40, 60), _nonzero(rng, 25), randint(rng, 12, 60)
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
    shown = f"{first}, {second}, {second + step}"
    return _school(rng, wordings, shown, steps, last, more_key=f"; {n}")


def school_exponent_linear(rng: Generator) -> TaskProblem:
    base, top = _pick(rng, ((2, 12), (3, 7), (5, 5), (6, 4), (7, 4), (10, 6)))
    exponent, k, x = randint(rng, 2, top), randint(rng, 1, 6), randint(rng, -5, 9)
    shift = exponent - k * x if _is_whole(rng) else _nonzero(rng, 15)
    formula = f"{base}^({_times(k, 'x')}{_plus(shift)}) = {base**exponent}"
    steps = (f"{base**exponent} = {base}^{exponent}", *_linear_steps(k, shift, Fraction(exponent)))
    return _school(rng, _SOLVE, formula, steps, Fraction(exponent - shift, k))


def school_fraction_linear(rng: Generator) -> TaskProblem:
    k, under = randint(rng, 1, 7), randint(rng, 2, 12)
    right, x = _nonzero(rng, 15), randint(rng, -15, 20)
    shift = under * right - k * x if _is_whole(rng) else _nonzero(rng, 40)
    formula = f"({_times(k, 'x')}{_plus(shift)})/{under} = {right}"
    product = Fraction(under * right)
    return _school(rng, _SOLVE, formula, _linear_steps(k, shift, product), (product - shift) / k)


def school_linear_nested(rng: Generator) -> TaskProblem:
    factor, shift = randint(rng, 2, 12), _nonzero(rng, 20)
    rest, x = _nonzero(rng, 40), randint(rng, -15, 25)
    total = factor * (x + shift) + rest if _is_whole(rng) else randint(rng, -60, 120)
    product = total - rest
    formula = f"{factor}(x{_plus(shift)}){_plus(rest)} = {total}"
    steps = (
        f"{factor}(x{_plus(shift)}) = {product}",
        *_linear_steps(1, shift, Fraction(product, factor)),
    )
    return _school(rng, _SOLVE, formula, steps, Fraction(product, factor) - shift)


def school_poly_remainder(rng: Generator) -> TaskProblem:
    coefficients = (randint(rng, 1, 5), *(randint(rng, -9, 9) for _ in range(2)), _nonzero(rng, 15))
    at = _nonzero(rng, 5)
    values = [c * at ** (3 - i) for i, c in enumerate(coefficients)]
    wordings = ("What is the remainder when {}?", "Find the remainder when {}.")
    formula = f"{_polynomial(coefficients)} is divided by x{_plus(-at)}"
    steps = (
        f"x = {at}",
        f"{_polynomial(coefficients)} = {_sum(values)}",
        f"{_sum(values)} = {sum(values)}",
    )
    return _school(rng, wordings, formula, steps, sum(values))


def school_quadratic_root(rng: Generator) -> TaskProblem:
    lead, top, other = randint(rng, 1, 4), _nonzero(rng, 12), _nonzero(rng, 12)
    lead, top = lead // gcd(lead, top), top // gcd(lead, top)
    if Fraction(top, lead) == other:
        other = -other  # two different roots, so that "larger" means something
    formula = f"{_polynomial((lead, -lead * other - top, top * other))} = 0"
    roots = (Fraction(top, lead), Fraction(other))
    steps = (
        f"({_times(lead, 'x')}{_plus(-top)})(x{_plus(-other)}) = 0",
        f"x = {roots[0]} or x = {roots[1]}",
    )
    return _school(rng, _LARGER, formula, steps, max(roots))


def school_system_combo(rng: Generator) -> TaskProblem:
    x, y = randint(rng, -9, 15), randint(rng, -9, 15)
    a, b, c, d = randint(rng, 1, 7), _nonzero(rng, 7), randint(rng, 1, 7), _nonzero(rng, 7)
    if a * d == b * c:
        a += 1  # moves the determinant off 0, because d is not 0
    e, f, determinant = a * x + b * y, c * x + d * y, a * d - b * c
    formula = f"{_equation(a, b, e)} and {_equation(c, d, f)}"
    steps = (
        _equation(a * d, b * d, e * d),
        _equation(c * b, b * d, f * b),
        *dict.fromkeys((f"{_times(determinant, 'x')} = {determinant * x}", f"x = {x}")),
        f"y = {y}",
    )
    return _school(
        rng, ("If {}, what is x + y?", "Find x + y, given that {}."), formula, steps, x + y
    )


def _equation(a: int, b: int, right: int) -> str:
    return f"{_times(a, 'x')}{_plus(b, 'y')} = {right}"


# ---------------------------------------------------------------- the table

TEMPLATES: dict[str, dict[str, Callable[[Generator], TaskProblem]]] = {  # by name and level
    "absolute_shift": {"easy": easy_absolute_shift, "school": school_absolute_shift},
    "arith_sequence": {"easy": easy_arith_sequence, "school": school_arith_sequence},
    "exponent_linear": {"easy": easy_exponent_linear, "school": school_exponent_linear},
    "fraction_linear": {"easy": easy_fraction_linear, "school": school_fraction_linear},
    "linear_nested": {"easy": easy_linear_nested, "school": school_linear_nested},
    "poly_remainder": {"easy": easy_poly_remainder, "school": school_poly_remainder},
    "quadratic_root": {"easy": easy_quadratic_root, "school": school_quadratic_root},
    "system_combo": {"easy": easy_system_combo, "school": school_system_combo},
}


LEVELS = {1: "easy", 2: "school"}  # by difficulty

# ---------------------------------------------------------------- rows

_first_new = partial(first_new, salt="algebra test side")


def rows(split: str, count: int, seed: int, difficulty: int) -> list[Row]:
    """Draw count different problems, the templates in turn; fewer if all templates have run out.

    Example row: {"data_source": "fraction_linear", "prompt": [{"role": "user", "content":
    "(x+3)/4=2, x?"}], "ability": "math", "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"uid": "algebra/easy/train/3", "split": "train", "level": "easy", "template":
    "fraction_linear", "solution": "x+3=8\\nAnswer: 5"}}
    """
    check_request("algebra", split, difficulty, list(LEVELS))
    level = LEVELS[difficulty]
    seen: set[str] = set()
    rows: list[Row] = []
    left, number = set(TEMPLATES), 0  # templates that have run out lose their turns
    while left and len(rows) < count:
        template = _template(number)
        if template in left:
            place = (seed, "algebra", level, split, template, number)
            problem = _first_new(TEMPLATES[template][level], place, split, seen)
            if problem is None:
                left.remove(template)
            else:
                rows.append(
                    {
                        "data_source": template,
                        "prompt": [_message("user", problem.prompt)],
                        "ability": "math",
                        "reward_model": {"style": "rule", "ground_truth": problem.answer},
                        "extra_info": {
                            "uid": f"algebra/{level}/{split}/{number}",
                            "split": split,
                            "level": level,
                            "template": template,
                            **problem.columns,
                        },
                    }
                )
        number += 1
    return rows


def warm_start(count: int, seed: int, difficulty: int, careless: float) -> list[Row]:
    """Make chats for supervised training, with problems of the train split, which may repeat.

    A share `careless` of them answers at once, with another problem's answer: plausible, and mostly
    wrong. A model trained on them has two habits, and reinforcement learning a better one to find.

    Example row: {"messages": [{"role": "user", "content": "(x+3)/4=2, x?"}, {"role": "assistant",
    "content": "x+3=8\\nAnswer: 5"}]}
    """
    rows, level = [], LEVELS[difficulty]
    for number in range(count):
        problem = _train_problem(seed, level, "warm", number)
        reply = problem.columns["solution"]
        if generator_at(seed, "algebra", level, "careless", number).random() < careless:
            reply = f"Answer: {_train_problem(seed, level, 'guess', number).answer}"
        rows.append({"messages": [_message("user", problem.prompt), _message("assistant", reply)]})
    return rows


def _template(number: int) -> str:
    return list(TEMPLATES)[number % len(TEMPLATES)]


def _train_problem(seed: int, level: str, use: str, number: int) -> TaskProblem:
    """Draw a problem of the train split, which other places may have too."""
    template = _template(number)
    place = (seed, "algebra", level, use, template, number)
    problem = _first_new(TEMPLATES[template][level], place, "train", set())
    assert problem is not None, "every template has problems in both splits"
    return problem


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TASK = Task(rows=rows, difficulties=tuple(LEVELS), warm_start=warm_start)
