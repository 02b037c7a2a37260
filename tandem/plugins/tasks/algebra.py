"""The algebra data set: eight templates at two difficulties, 1 (easy) and 2 (school).

    tandem generate algebra --difficulty 2 --count 192 --out train.jsonl

Gives rows in verl's schema, and chats for a supervised warm start. Knows nothing of models, tokens
or rewards (`answer` fits); the mathematics is in algebra_templates.py.
"""

from functools import partial

from tandem.plugins.tasks.algebra_templates import TEMPLATES
from tandem.plugins.tasks.generate import (
    Row,
    Task,
    TaskProblem,
    check_request,
    first_new,
    generator_at,
)

LEVELS = {1: "easy", 2: "school"}  # by difficulty
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
