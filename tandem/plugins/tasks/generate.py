"""Shared by the generated tasks: addressed random numbers, splits that never meet, no duplicates.

Every problem is addressed by (seed, task, difficulty, split, number), so a longer data set begins
with the shorter one. Knows rows and splits. Does not know the tasks: each is a module beside this
one, and has a TASK, which the registry names.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem.runtime.errors import UserError
from tandem.runtime.rng import address

Row = dict[str, Any]
Generator = np.random.Generator

ATTEMPTS = 2000  # a task whose 2,000th problem is not new has, for practical purposes, run out
SPLITS = ("train", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One built-in task.

    rows(split, count, seed, difficulty) draws that many different problems, or all it has. The rows
    of a split, seed and difficulty begin with those of a smaller count, and no problem is in both
    splits. Raises UserError for an unknown split or difficulty.
    """

    rows: Callable[[str, int, int, int], list[Row]]
    difficulties: Sequence[int]  # the first is the default
    # warm_start(count, seed, difficulty, careless) makes chats for supervised training
    warm_start: Callable[..., list[Row]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskProblem:
    """One problem.

    Example: TaskProblem(prompt="12+34=?", answer="46", dedup_key="[12, 34]", columns={"terms": [12,
    34]})
    """

    prompt: str
    answer: str
    # equal for two wordings of one problem; it also decides between train and test
    dedup_key: str
    # more columns of the row, for environments and rewards
    columns: dict[str, Any] = field(default_factory=dict)


def drawn(
    name: str, make: Callable[[Generator, int], TaskProblem], difficulties: Iterable[int]
) -> Task:
    """Return the task whose problems make(rng, difficulty) draws, one by one.

    Example row: {"uid": "guess/1/train/0", "prompt": "Guess my number, 12 to 19. I say higher or
    lower.", "answer": "17", "data_source": "guess_1", "difficulty": 1, "low": 12, "high": 19}
    """
    levels = tuple(difficulties)

    def rows(split: str, count: int, seed: int, difficulty: int) -> list[Row]:
        check_request(name, split, difficulty, levels)
        seen, rows = set[str](), list[Row]()
        for number in range(count):
            place = (seed, name, difficulty, split, number)
            problem = first_new(lambda rng: make(rng, difficulty), place, split, seen)
            if problem is None:
                break
            rows.append(
                {
                    "uid": f"{name}/{difficulty}/{split}/{number}",
                    "prompt": problem.prompt,
                    "answer": problem.answer,
                    "data_source": f"{name}_{difficulty}",
                    "difficulty": difficulty,
                    **problem.columns,
                }
            )
        return rows

    return Task(rows=rows, difficulties=levels)


def first_new(
    make: Callable[[Generator], TaskProblem],
    place: Sequence[int | str],
    split: str,
    seen: set[str],
    salt: str = "test side",
) -> TaskProblem | None:
    """Draw at `place` until a problem is in the split and its key not in `seen`; add the key there.

    None if the task has run out. salt: as in is_test.
    """
    for attempt in range(ATTEMPTS):
        problem = make(generator_at(*place, attempt))
        key = problem.dedup_key
        if is_test(key, salt) == (split == "test") and key not in seen:
            seen.add(key)
            return problem
    return None


def is_test(dedup_key: str, salt: str = "test side") -> bool:
    """Tell whether a problem is in the test split: a fifth are, at any seed and size."""
    return address(salt, dedup_key) % 5 == 0


def check_split(task: str, split: str) -> None:
    if split not in SPLITS:
        raise UserError(
            f"there is no such split of {task}", found=split, expected=" or ".join(SPLITS)
        )


def check_request(task: str, split: str, difficulty: int, difficulties: Sequence[int]) -> None:
    """Raise UserError for a split or a difficulty that the task does not have."""
    check_split(task, split)
    if difficulty not in difficulties:
        raise UserError(
            f"there is no such difficulty of {task}",
            found=str(difficulty),
            expected=f"{difficulties[0]} to {difficulties[-1]}",
        )


def generator_at(*place: int | str) -> Generator:
    """Make a generator whose numbers depend on the place alone."""
    return np.random.Generator(np.random.Philox(key=address(*place)))


def randint(rng: Generator, low: int, high: int) -> int:
    """Draw uniformly from low..high, both included."""
    return int(rng.integers(low, high + 1))


def rand_digits(rng: Generator, count: int) -> int:
    """Draw uniformly from the positive numbers of that many digits."""
    return randint(rng, 10 ** (count - 1), 10**count - 1)
