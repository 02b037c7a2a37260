"""What the generated tasks share: addressed draws, a train and a test side that never meet, no
problem twice.

Every problem is addressed by (seed, task, difficulty, split, number), so a longer data set begins
with the shorter one. Knows rows and sides. Does not know what the tasks are: each is a module
beside this one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem.runtime import rng
from tandem.runtime.errors import UserError

Row = dict[str, Any]
Draw = np.random.Generator

ATTEMPTS = 2000  # a task whose 2,000th draw is not new has, for practical purposes, run out
SPLITS = ("train", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One problem.

    Example: Draft(prompt="12+34=?", answer="46", side="12+34", core="12+34", columns={"terms": [12,
    34]})
    """

    prompt: str
    answer: str
    # decides between train and test: what makes the problem the same, however it is written
    side: str
    core: str  # two drafts are one problem when it is equal
    # more columns of the row, for environments and rewards
    columns: dict[str, Any] = field(default_factory=dict)


Make = Callable[[Draw, int], Draft]


def draw_rows(
    task: str, make: Make, split: str, count: int, seed: int, difficulty: int, levels: list[int]
) -> list[Row]:
    """Draw count different problems of a split; fewer where the task has no more. make(draw,
    difficulty) draws one; levels: the difficulties there are.

    Raises UserError for another split or level.
    """
    check_split(task, split)
    if difficulty not in levels:
        expected = f"{levels[0]} to {levels[-1]}"
        raise UserError(
            f"there is no such difficulty of {task}", found=str(difficulty), expected=expected
        )
    seen: set[str] = set()
    rows = []
    for number in range(count):
        draft = _first_new(make, task, split, difficulty, (seed, number), seen)
        if draft is None:
            break
        seen.add(draft.core)
        rows.append(_row(draft, task, split, difficulty, number))
    return rows


def check_split(task: str, split: str) -> None:
    if split not in SPLITS:
        raise UserError(
            f"there is no such split of {task}", found=split, expected=" or ".join(SPLITS)
        )


def is_test(side: str) -> bool:
    """Which side a problem is on; a fifth are test problems, whatever the seed and the size."""
    return rng.address("test side", side) % 5 == 0


def _first_new(
    make: Make, task: str, split: str, difficulty: int, place: tuple[int, int], seen: set[str]
) -> Draft | None:
    """The first draft at this place (seed, number) that is on the split's side and new; None where
    the task has run out."""
    seed, number = place
    for attempt in range(ATTEMPTS):
        key = rng.address(seed, task, difficulty, split, number, attempt)
        draft = make(np.random.Generator(np.random.Philox(key=key)), difficulty)
        if is_test(draft.side) == (split == "test") and draft.core not in seen:
            return draft
    return None


def _row(draft: Draft, task: str, split: str, difficulty: int, number: int) -> Row:
    return {
        "uid": f"{task}/{difficulty}/{split}/{number}",
        "prompt": draft.prompt,
        "answer": draft.answer,
        "data_source": f"{task}_{difficulty}",
        "difficulty": difficulty,
        **draft.columns,
    }


def whole(draw: Draw, low: int, high: int) -> int:
    """Uniform over low..high, both included."""
    return int(draw.integers(low, high + 1))


def digits(draw: Draw, count: int) -> int:
    """Uniform over the positive numbers of that many digits."""
    return whole(draw, 10 ** (count - 1), 10**count - 1)
