"""The comparison of a program's output, or a function's result, with a test's, outside any sandbox.

Trusts a reply to be text, or plain data in the JSON of code_inside.py, and no more.

    python -c "from tandem.rewards.code_compare import same_output as s; print(s('1 \\n', '1'))"
"""

import json
import math
from typing import Any

from tandem.rewards.code_asserts import WRAPPERS, CallTest
from tandem.rewards.code_inside import decode


def same_output(found: str, expected: str, tolerance: float = 0.0) -> bool:
    """Compare lines, without spaces at their ends and empty lines at the end; with a tolerance,
    words."""
    one, other = (
        [line.rstrip() for line in text.rstrip().split("\n")] for text in (found, expected)
    )
    if one == other or not tolerance:
        return one == other
    words, wanted = found.split(), expected.split()
    return len(words) == len(wanted) and all(
        _same_word(a, b, tolerance) for a, b in zip(words, wanted, strict=True)
    )


def _same_word(found: str, expected: str, tolerance: float) -> bool:
    try:
        return found == expected or _close(float(found), float(expected), tolerance)
    except ValueError:
        return False


def _close(found: float, expected: float, tolerance: float) -> bool:
    return math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)


def holds(test: CallTest, reply: str, tolerance: float = 0.0) -> bool:
    """Compare a reply of code_inside.py with the test's expected value."""
    try:
        value = WRAPPERS[test.wrapper](decode(json.loads(reply)["value"], _no_object))
        match test.compare:
            case "truth":
                return bool(value) is test.expected[0]
            case "is":
                return type(value) is type(test.expected[0]) and value == test.expected[0]
            case "json":
                found = _as_json(value)
                return any(_same(found, _as_json(item), tolerance) for item in test.expected)
            case "equal":
                return any(_same(value, item, tolerance) for item in test.expected)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return False


def _no_object(number: int) -> Any:
    raise ValueError("an object is no value")


def _same(found: Any, expected: Any, tolerance: float) -> bool:
    """Compare plain data as Python does, but NaN equals NaN; numbers, however deep, within the
    tolerance."""
    if isinstance(expected, float | int) and isinstance(found, float | int):
        both_nan = expected != expected and found != found
        return (
            both_nan or found == expected or (tolerance > 0 and _close(found, expected, tolerance))
        )
    if type(found) is type(expected) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(
            _same(a, b, tolerance) for a, b in zip(found, expected, strict=True)
        )
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            _same(found[k], expected[k], tolerance) for k in expected
        )
    return bool(found == expected)


def _as_json(value: Any) -> Any:
    """Convert to JSON's types: tuples become lists, and a dict's keys strings."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else json.dumps(key): _as_json(item)
            for key, item in value.items()
        }
    return value
