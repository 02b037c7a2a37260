"""One reward with named parts from the results of reward functions; checks of lists of functions.

Knows neither processes nor how a function is called.

    python -c "from tandem.rewards.parts import weigh; \
        print(weigh({'a': (0.5, {}), 'b': (3.0, {'x': 1.0})}, [1.0, 0.1]))"
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from numbers import Real
from operator import add
from typing import Any

import numpy as np

from tandem.runtime.errors import UserError
from tandem.runtime.user_code import run_by_hand

MAX_PARTS = 64
MAX_NAME_CHARS = 64

Result = tuple[float, dict[str, float]]  # (reward, parts)
Options = Mapping[str, Mapping[str, Any]]  # keyword arguments by function name


class BadFunction(Exception):
    """A reward function that is missing, or cannot be called in a known way or with its options."""


class BadValue(Exception):
    """A result that is not a reward, or a row that a reward function cannot read."""


def checked_by(
    check: Callable[[Mapping[str, Any]], None],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a built-in function a check of its options before the first item, which may import what
    takes long; it raises BadFunction."""

    def give(function: Callable[..., Any]) -> Callable[..., Any]:
        function.check_options = check  # type: ignore[attr-defined]
        return function

    return give


def part_name(function: str) -> str:
    """Return the name of FUNCTION in parts, options and errors: "score" for "my.py:score"."""
    return function.rpartition(":")[2]


def cannot_load(function: str, found: str, where: str) -> UserError:
    """Make the error for a reward function that does not exist, fails to load, or has an unknown
    form. found: the described exception; where: its line."""
    reason = found.removeprefix("BadFunction: ")
    source = function.rpartition(":")[0]
    look = run_by_hand(source)
    if reason != found:
        look = "docs/guide/rewards.md has an example of each form, and of every built-in"
    return UserError(
        "the reward function cannot be loaded",
        where=f"reward.function = {function}" + (f" ({where})" if where else ""),
        found=reason,
        expected="a built-in, `module:function` or `file.py:function`, "
        "with a signature of docs/guide/rewards.md",
        next=look,
    )


def as_it_is(functions: Sequence[str], weights: Sequence[float]) -> bool:
    """Tell whether the result of the one function, unweighted, is the score as it is; else weigh
    makes the score."""
    return len(functions) == 1 and not weights


def check_functions(functions: Sequence[str], weights: Sequence[float], options: Options) -> None:
    """Refuse functions with equal names, and weights and options that do not fit them, before
    loading any. Raises UserError."""
    names = [part_name(function) for function in functions]
    if len(set(names)) < max(1, len(names)):
        raise UserError(
            "the reward functions cannot be told apart",
            where="reward.function",
            found=", ".join(functions) or "no function",
            expected="one function or more, each with a name of its own behind the colon",
        )
    if weights and (len(weights) != len(names) or not all(map(math.isfinite, weights))):
        raise UserError(
            "the reward weights do not fit the reward functions",
            where="reward.weights",
            found=", ".join(map(str, weights)),
            expected=f"one finite number for each of {', '.join(functions)}",
        )
    for name in options:
        if name not in names:
            raise UserError(
                "the options are for a reward function that is not used",
                where=f"reward.options.{name}",
                expected=", ".join(names),
            )


def read_value(value: Any, part: str) -> Result:
    """Return the (reward, parts) of a function's result; raises BadValue.

    part: the name of a lone float among the parts; empty: it is not a part.
    """
    if not isinstance(value, dict):
        reward = number(value, "the reward")
        return reward, {part: reward} if part else {}
    short = all(isinstance(key, str) and len(key) <= MAX_NAME_CHARS for key in value)
    if not 1 <= len(value) <= MAX_PARTS or not short:
        raise BadValue(
            f"expected a dict of 1 to {MAX_PARTS} parts with short names, found {len(value)} parts"
        )
    parts = {key: number(part_value, f"part {key!r}") for key, part_value in value.items()}
    if "reward" in parts:
        return parts.pop("reward"), parts
    return number(reduce(add, parts.values(), 0.0), "the sum of the parts"), parts


def weigh(results: Mapping[str, Result | None], weights: Sequence[float]) -> Result:
    """Return the weighted sum of the functions' rewards, and the parts of all; raises BadValue.

    The parts are each function's reward, unweighted and under the function's name, and the parts of
    its dict, under their own names, or as `function.part` if another function has the name or a
    part of it. A function that does not apply (None) adds nothing.

    Example: weigh({"a": (0.5, {}), "b": (3.0, {"x": 1.0, "a": 2.0})}, [1.0, 0.1]) gives (0.8, {"a":
    0.5, "b": 3.0, "x": 1.0, "b.a": 2.0})
    """
    applied = {name: result for name, result in results.items() if result is not None}
    total = 0.0
    for name, weight in zip(results, weights, strict=True):
        if name in applied:
            total += weight * applied[name][0]
    parts = {name: reward for name, (reward, _) in applied.items()}
    counts = Counter([*results, *(part for _, own in applied.values() for part in own)])
    for name, (_, own) in applied.items():
        for part, value in own.items():
            label = part if counts[part] == 1 else f"{name}.{part}"
            if label in parts:
                raise BadValue(f"two parts are named {label!r}, expected one")
            parts[label] = value
    return number(total, "the weighted sum of the rewards"), parts


def number(value: Any, what: str) -> float:
    """Return a finite float; raises BadValue. what: the value's name in the error."""
    if not isinstance(value, (Real, np.bool_)):
        shown = f" ({value[:40]!r})" if isinstance(value, str) else ""
        raise BadValue(f"{what} is of type {type(value).__name__}{shown}, expected a float")
    try:
        as_float = float(value)
    except OverflowError:
        as_float = math.inf
    if not math.isfinite(as_float):
        raise BadValue(f"{what} is {as_float}, expected a finite number")
    return as_float
