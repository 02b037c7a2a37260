"""The built-in generated tasks by name, and the files they are written to.

Knows which tasks there are. Does not know what is in them: algebra.py, arithmetic.py,
calculator.py, countdown.py, guess.py.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tandem.runtime.disk import write_atomic
from tandem.tasks import algebra, arithmetic, calculator, countdown, guess
from tandem.tasks.generate import Row

TASKS = {  # name -> (its rows, its lowest difficulty)
    "algebra": (algebra.rows, 1),
    "arithmetic": (arithmetic.rows, 1),
    "calculator": (calculator.rows, 1),
    "countdown": (countdown.rows, countdown.LEVELS[0]),
    "guess": (guess.rows, 1),
}


def task_rows(task: str, split: str, count: int, seed: int, difficulty: int | None) -> list[Row]:
    """Make count different problems of one of TASKS, or all that it has; difficulty None is its
    lowest. Raises UserError.

    The rows of (task, split, seed, difficulty) begin with those of a smaller count, and no problem
    is on both sides.
    """
    rows, lowest = TASKS[task]
    return rows(split, count, seed, lowest if difficulty is None else difficulty)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """JSONL, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode())
