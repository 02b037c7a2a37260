"""Questions that need a calculator: "387*542=?". The difficulty is how many numbers of how many
digits.

    tandem generate calculator --difficulty 1 --count 400 --out train.jsonl

Too hard for a model of a million parameters by itself, and easy with a tool that works out what it
is given. Knows arithmetic. Does not know tools, files, models or rewards (`answer` fits).
"""

from collections.abc import Callable

from tandem.tasks.generate import Draft, Draw, Row, digits, draw_rows, whole

# difficulty -> (digits, what can be asked and what it is worth)
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


def rows(split: str, count: int, seed: int, difficulty: int) -> list[Row]:
    """count different problems.

    Example row: {"uid": "calculator/1/train/0", "prompt": "387*542=?", "answer": "209754",
    "data_source": "calculator_1", "difficulty": 1, "expression": "387*542"}
    """
    return draw_rows("calculator", _draft, split, count, seed, difficulty, list(FORMS))


def _draft(draw: Draw, difficulty: int) -> Draft:
    length, forms = FORMS[difficulty]
    form, worth = list(forms.items())[whole(draw, 0, len(forms) - 1)]
    numbers = [digits(draw, length) for _ in range(form.count("{}"))]
    expression = form.format(*numbers)
    core = f"{form} of {sorted(numbers)}"  # the same numbers in another order are the same problem
    return Draft(
        prompt=f"{expression}=?",
        answer=str(worth(*numbers)),
        side=core,
        core=core,
        columns={"expression": expression},
    )
