"""The built-in tasks by name: their rows, checkers and environments.

A new task is one file beside this one and one line in TASKS. Knows the list of tasks, not their
contents. reasoning_gym.py is apart: its rows are of many data sets, and it needs an extra.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.plugins.tasks import algebra, arithmetic, calculator, countdown, guess, squares
from tandem.plugins.tasks.generate import Row
from tandem.runtime.disk import write_atomic
from tandem.types import Env


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One built-in task. Example: `Task(rows=guess.rows, difficulties=(1, 2), env=GuessTheNumber)`

    rows(split, count, seed, difficulty) draws the problems. checker(problem, completion, extract,
    **options) is the reward of the task's name; extract gives a completion's final answer, and a
    ValueError says that the row is wrong. env is the environment of the task's name, tool the
    function that `tools = "NAME"` offers a model.
    """

    rows: Callable[[str, int, int, int], list[Row]]
    difficulties: Sequence[int]  # the first is the default
    checker: Callable[..., float] | None = None
    env: type[Env] | None = None
    tool: Callable[..., object] | None = None


TASKS = {
    "algebra": Task(rows=algebra.rows, difficulties=tuple(algebra.LEVELS)),
    "arithmetic": Task(rows=arithmetic.rows, difficulties=tuple(arithmetic.LEVELS)),
    "calculator": Task(
        rows=calculator.rows, difficulties=tuple(calculator.FORMS), tool=calculator.calculator
    ),
    "countdown": Task(
        rows=countdown.rows, difficulties=tuple(countdown.LEVELS), checker=countdown.check
    ),
    "guess": Task(rows=guess.rows, difficulties=tuple(guess.WIDTHS), env=guess.GuessTheNumber),
    "squares": Task(rows=squares.rows, difficulties=tuple(squares.LEVELS)),
}


def task_rows(task: str, split: str, count: int, seed: int, difficulty: int | None) -> list[Row]:
    """Draw count different problems of one of TASKS, or all it has; difficulty None is its lowest.
    Raises UserError.

    The rows of (task, split, seed, difficulty) begin with those of a smaller count, and no problem
    is in both splits.
    """
    lowest = TASKS[task].difficulties[0]
    return TASKS[task].rows(split, count, seed, lowest if difficulty is None else difficulty)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write JSONL, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode())
