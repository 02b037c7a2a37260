"""The built-in generated tasks by name, and the files they are written to.

Knows which tasks there are. Does not know what is in them: algebra.py, arithmetic.py, calculator.py, countdown.py, guess.py.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from tandem.data import algebra, arithmetic, calculator, countdown, guess
from tandem.data.drawing import Row
from tandem.disk import write_atomic

Task = Literal["algebra", "arithmetic", "calculator", "countdown", "guess"]
TASKS = get_args(Task)


def task_rows(task: Task, split: str, count: int, seed: int, difficulty: int | None) -> list[Row]:
    """count different problems of a task; difficulty None is its lowest. Raises UserError.

    The rows of (task, split, seed, difficulty) begin with those of a smaller count, and no problem is on both sides.
    """
    match task:
        case "algebra":
            return algebra.rows(split, count, seed, 1 if difficulty is None else difficulty)
        case "arithmetic":
            return arithmetic.rows(split, count, seed, 1 if difficulty is None else difficulty)
        case "calculator":
            return calculator.rows(split, count, seed, 1 if difficulty is None else difficulty)
        case "countdown":
            return countdown.rows(split, count, seed, countdown.LEVELS[0] if difficulty is None else difficulty)
        case "guess":
            return guess.rows(split, count, seed, 1 if difficulty is None else difficulty)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """JSONL, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode())
