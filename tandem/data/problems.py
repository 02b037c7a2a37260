"""Problems from a file, and which of them a step trains on.

Reads Tandem's own rows and verl's (docs/data.md). The order of problems is a function of (seed, step) alone, so the
step number is the whole data cursor and a resume cannot skip or repeat data. Does not know tokens, templates or models.
"""

from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tandem import draws
from tandem.config import Data
from tandem.data.messages import prompt_messages
from tandem.data.rows import Row, RowError, column, exact_number, read_rows, show
from tandem.types import Array, Message, Problem

T = TypeVar("T")  # a problem, or whatever else a step takes from a list

DEFAULT_ANSWER = Data.model_fields["answer_column"].default
DEFAULT_CATEGORY = Data.model_fields["category_column"].default
VERL_ANSWER = ("reward_model", "ground_truth")


def read_problems(path: str, config: Data, *, key: str) -> list[Problem]:
    """The problems of a JSONL or Parquet file, in file order. key: the config key that names it, e.g. "data.train".

    Raises UserError with every kind of mistake in the file, up to ten.
    """
    seen: dict[str, int] = {}  # uid -> row
    return read_rows(path, partial(_problem, config=config, stem=Path(path).stem, seen=seen), key=key)


def _problem(row: Row, *, config: Data, stem: str, seen: dict[str, int]) -> Problem:
    prompt = column(row, config.prompt_column, rename="set data.prompt_column={}")
    messages = prompt_messages(prompt, field=config.prompt_column)
    answer_path = _answer_path(row, config.answer_column)
    problem = Problem(
        uid=_uid(row, stem),
        messages=_with_system(messages, config.system),
        answer=_answer(row, answer_path),
        category=_category(row, config.category_column),
        metadata=_metadata(row, (config.prompt_column, config.category_column, "uid"), answer_path),
    )
    first = seen.setdefault(problem.uid, row.number)
    if first != row.number:
        # A uid addresses the random draws of its problem: two problems with one uid would be sampled alike.
        raise RowError(f"{show(problem.uid)}, as in row {first}", "a uid that no other row has", field="uid")
    return problem


def _answer_path(row: Row, name: str) -> tuple[str, ...]:
    """Where the row's answer is: the answer column, or verl's place for it where the config names no column."""
    verl = row.values.get("reward_model")
    has_verl = isinstance(verl, dict) and verl.get("ground_truth") is not None
    if name == DEFAULT_ANSWER and has_verl and row.values.get(name) is None:
        return VERL_ANSWER
    column(row, name, rename="set data.answer_column={}")
    return (name,)


def _answer(row: Row, path: tuple[str, ...]) -> str:
    value: Any = row.values
    for name in path:
        value = value[name]
    if isinstance(value, str):
        return value
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return exact_number(row, *path)
    raise RowError(show(value), "text or a number", field=".".join(path))


def _category(row: Row, name: str) -> str:
    if name == DEFAULT_CATEGORY and row.values.get(name) is None:
        return ""
    return _text(column(row, name, rename="set data.category_column={}"), field=name)


def _uid(row: Row, stem: str) -> str:
    if row.values.get("uid") is not None:
        return _text(row.values["uid"], field="uid")
    extra = row.values.get("extra_info")
    if isinstance(extra, dict) and extra.get("uid") is not None:
        return _text(extra["uid"], field="extra_info.uid")
    return f"{stem}/{row.number}"


def _text(value: Any, *, field: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RowError("empty text" if value == "" else show(value), "text or a whole number", field=field)
    return str(value)


def _with_system(messages: tuple[Message, ...], system: str) -> tuple[Message, ...]:
    if not system or any(message["role"] == "system" for message in messages):
        return messages
    return ({"role": "system", "content": system}, *messages)


def _metadata(row: Row, used: tuple[str, ...], answer_path: tuple[str, ...]) -> dict[str, Any]:
    """Every column that has no other place, so that a reward function finds all of its row."""
    rest = {name: value for name, value in row.values.items() if name not in used and name != answer_path[0]}
    if answer_path == VERL_ANSWER:
        reward_model = {name: value for name, value in row.values["reward_model"].items() if name != "ground_truth"}
        rest |= {"reward_model": reward_model} if reward_model else {}
    return rest


def epoch_order(num_problems: int, seed: int, epoch: int, shuffle: bool) -> Array:
    """int64 [num_problems]: the indices of the problems in the order in which the epoch visits them."""
    if not shuffle:
        return np.arange(num_problems, dtype=np.int64)
    return draws.permutation(num_problems, seed, "epoch order", epoch)


def problems_of_step(problems: Sequence[T], step: int, per_step: int, seed: int, shuffle: bool) -> list[T]:
    """The problems of a step, counted from 0. Epochs follow each other without a gap, also inside a step.

    A problem can come twice in one step: always when per_step exceeds the number of problems, and where a step spans
    the end of an epoch, because the next epoch has its own shuffle.
    """
    size, first = len(problems), step * per_step
    chosen = []
    for epoch in range(first // size, (first + per_step - 1) // size + 1):
        order = epoch_order(size, seed, epoch, shuffle)
        start, end = first - epoch * size, first + per_step - epoch * size
        chosen += [problems[i] for i in order[max(0, start) : end].tolist()]
    return chosen
