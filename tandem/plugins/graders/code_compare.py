"""The comparison of a program's output, or a function's result, with a test's, outside any sandbox.

Trusts a reply to be text, or plain data in the JSON of code_inside.py, and no more.

    python -c "from tandem.plugins.graders.code_compare import same_output as s; print(s(' ', '1'))"
"""

import json
import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

from tandem.plugins.graders.code_asserts import CallTest
from tandem.plugins.graders.code_inside import decode, encode

PRINTED = 1e-6  # the tolerance of judges, absolute or relative, between printed floats
FLOAT_CHARS = 24  # a longer decimal is meant digit by digit
_NUMBER = re.compile(r"(?<![\w.])-?\d+(\.\d+)?([eE][-+]?\d+)?(?![\w.])")


def same_output(found: str, expected: str, tolerance: float | None = None) -> bool:
    """Compare lines, without spaces at their ends and empty lines at the end.

    tolerance: absolute or relative, between numbers at the same place of the same text; None:
    PRINTED, and only where both are floats.
    """
    one, other = (
        [line.rstrip() for line in text.rstrip().split("\n")] for text in (found, expected)
    )
    return len(one) == len(other) and all(
        a == b or (tolerance != 0 and _same_line(a, b, tolerance))
        for a, b in zip(one, other, strict=True)
    )


def _same_line(found: str, expected: str, tolerance: float | None) -> bool:
    if _NUMBER.sub("0", found) != _NUMBER.sub("0", expected):
        return False
    for one, other in zip(_NUMBER.finditer(found), _NUMBER.finditer(expected), strict=True):
        floats = (one[1] or one[2]) and (other[1] or other[2])
        if tolerance is None and (not floats or max(len(one[0]), len(other[0])) > FLOAT_CHARS):
            same = one[0] == other[0]
        else:
            same = _close(
                float(one[0]), float(other[0]), PRINTED if tolerance is None else tolerance
            )
        if not same:
            return False
    return True


def _close(found: float, expected: float, tolerance: float) -> bool:
    return math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)


def reply_bytes(test: CallTest) -> int:
    """Return the size that no right reply passes."""
    return 4096 + 8 * max(len(json.dumps(encode(value, repr))) for value in test.expected)


def holds(test: CallTest, reply: str, tolerance: float = 0.0) -> bool:
    """Compare a reply of code_inside.py with the test's expected value."""
    if len(reply) > reply_bytes(test):
        return False
    try:
        value = decode(json.loads(reply)["value"], _number)
        match test.compare:
            case "json":
                found = _as_json(value)
                return any(_same(found, _as_json(item), tolerance) for item in test.expected)
            case "equal":
                return any(_same(value, item, tolerance) for item in test.expected)
    except Exception:  # whatever a forged reply leads to is no value
        return False


def _number(kind: str, content: Any) -> Any:
    """Make a number or bytes of a class that can equal a constant, within bounds: a forged one
    would be a large amount of work."""
    if kind == "child":
        return decode(content[0], _number)
    match kind, decode(content, _number):
        case "builtins.bytearray", [bytes(data)]:
            return data
        case "fractions.Fraction", [int(one), int(other)] if max(abs(one), abs(other)) < 2**4096:
            return Fraction(one, other)
        case "decimal.Decimal", [str(text)] if len(text) < 1000:
            return Decimal(text)
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
