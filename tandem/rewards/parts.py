"""What reward functions return, made one reward with named parts; and which lists of functions make
sense.

It knows neither processes nor how a function is called.

    python -c "from tandem.rewards.parts import weigh; print(weigh({'a': (0.5, {}), 'b': (3.0, {'x': 1.0})}, [1.0, 0.1]))"
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from tandem.runtime.errors import UserError

MAX_PARTS = 64

Result = tuple[float, dict[str, float]]  # (reward, parts)
Options = Mapping[str, Mapping[str, Any]]  # keyword arguments by function name


class BadFunction(Exception):
    """A name names no reward function, or it cannot be called in a known way, or not with its
    options."""


class BadValue(Exception):
    """A reward function returned something that is not a reward."""


def part_name(function: str) -> str:
    """What FUNCTION is called in parts, options and errors: "score" for "my.py:score"."""
    return function.rpartition(":")[2]


def cannot_load(function: str, found: str, where: str) -> UserError:
    """The error for a reward function that is not there, fails while it is loaded, or has no known
    form (BadFunction)."""
    source = function.rpartition(":")[0]
    look = f"python {source}" if source.endswith(".py") else f'python -c "import {source}"'
    known, form = "`module:function` or `file.py:function`", found.startswith("BadFunction: ")
    return UserError(
        "the reward function cannot be loaded",
        where=f"reward.function = {function}" + (f" ({where})" if where else ""),
        found=found.removeprefix("BadFunction: "),
        expected=f"a built-in, {known}, with a signature of docs/rewards.md",
        next="see docs/rewards.md, or tandem try REWARD" if form else look,
    )


def as_it_is(functions: Sequence[str], weights: Sequence[float]) -> bool:
    """Whether the only function's reward and parts are the score's; else weigh makes them."""
    return len(functions) == 1 and not weights


def check_functions(functions: Sequence[str], weights: Sequence[float], options: Options) -> None:
    """Refuse what makes no sense before anything is loaded: functions whose parts could not be told
    apart, weights and options that are not theirs."""
    names = [part_name(function) for function in functions]
    if len(set(names)) < max(1, len(names)):
        what, found = (
            "the reward functions cannot be told apart",
            ", ".join(functions) or "no function",
        )
        expected = "one function or more, each with a name of its own behind the colon"
        raise UserError(
            what,
            where="reward.function",
            found=found,
            expected=expected,
            next="rename one, or remove it",
        )
    if weights and (len(weights) != len(names) or not all(map(math.isfinite, weights))):
        what, found = (
            "the reward weights do not fit the reward functions",
            ", ".join(map(str, weights)),
        )
        expected = f"one finite number for each of {', '.join(functions)}"
        raise UserError(what, where="reward.weights", found=found, expected=expected)
    for name in options:
        if name not in names:
            what, expected = (
                "the options are for a reward function that is not used",
                ", ".join(names),
            )
            raise UserError(what, where=f"reward.options.{name}", found=name, expected=expected)


def read_value(value: Any, part: str) -> Result:
    """(reward, parts) of what a function returned; raises BadValue. part names a lone float; empty:
    it is no part."""
    if not isinstance(value, dict):
        reward = number(value, "the reward")
        return reward, {part: reward} if part else {}
    if (
        not value
        or len(value) > MAX_PARTS
        or not all(isinstance(key, str) and len(key) <= MAX_PARTS for key in value)
    ):
        raise BadValue(
            f"expected a dict of 1 to {MAX_PARTS} parts with short names, found {len(value)} parts"
        )
    parts = {key: number(part_value, f"part {key!r}") for key, part_value in value.items()}
    reward = (
        parts.pop("reward")
        if "reward" in parts
        else number(sum(parts.values()), "the sum of the parts")
    )
    return reward, parts


def weigh(results: Mapping[str, Result | None], weights: Sequence[float]) -> Result:
    """The weighted sum of the functions' rewards, and the parts of all; raises BadValue.

    The parts are each function's reward, unweighted and under the function's name, and the parts of
    its dict, which keep their names. Where another function has the name too, or is called so, a
    part becomes `function.part`. A function that does not apply (None) adds nothing and is no part.
    Example: weigh({"a": (0.5, {}), "b": (3.0, {"x": 1.0, "a": 2.0})}, [1.0, 0.1]) gives (0.8, {"a":
    0.5, "b": 3.0, "x": 1.0, "b.a": 2.0})
    """
    weighed = [
        (name, weight, result)
        for (name, result), weight in zip(results.items(), weights, strict=True)
    ]
    there = [(name, weight, *result) for name, weight, result in weighed if result is not None]
    total = 0.0
    for _, weight, reward, _ in there:
        total += weight * reward  # not sum(), which gives other bits since Python 3.12
    parts = {name: reward for name, _, reward, _ in there}
    owners = Counter([*results, *(part for _, _, _, own in there for part in own)])
    for name, _, _, own in there:
        for part, value in own.items():
            label = part if owners[part] == 1 else f"{name}.{part}"
            if label in parts:
                raise BadValue(f"two parts are named {label!r}, expected one")
            parts[label] = value
    return number(total, "the weighted sum of the rewards"), parts


def number(value: Any, what: str) -> float:
    """A finite float; raises BadValue. what: who it is, in the error."""
    if not isinstance(value, (Real, np.bool_)):
        raise BadValue(f"{what} is of type {type(value).__name__}, expected a float")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise BadValue(f"{what} is {found}, expected a finite number")
    return found
