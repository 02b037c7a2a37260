"""A program inside the sandbox, beside a model's code; code.py and code_tester.py speak to it in
JSON.

    python code_inside.py    loads solution.py, then answers each line of stdin, [operation,
                             arguments], with {"value": ...}, or {"error": [class, text, args,
                             attributes]}

Operations are Python's builtins, those of the module `operator`, `eval`, `call` and `first`. Only
plain data comes back, so the solution can reach no expected value, verdict, frame, checker or exit
code. The solution controls all of `solve`; its lines are trusted to be values, and no more.
"""

import builtins
import contextlib
import json
import operator
import os
import sys
from collections import deque
from collections.abc import Callable, Container
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any

FLUSH = "__flush__"  # a name that a script gets (code_tests.across_the_line)

# ---------------------------------------------------------------- values as JSON

# What JSON lacks of plain data: by name its class, the arguments that make a value again, and what
# takes them. A datetime is a date too, and comes first.
KINDS: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "tuple": (tuple, lambda value: [[*value]], tuple),
    "set": (set, lambda value: [[*value]], set),
    "frozenset": (frozenset, lambda value: [[*value]], frozenset),
    "dict": (dict, lambda value: [[[*item] for item in value.items()]], dict),
    "bytes": (bytes, lambda value: [value.hex()], bytes.fromhex),
    "complex": (complex, lambda value: [value.real, value.imag], complex),
    "bytearray": (bytearray, lambda value: [value.hex()], bytearray.fromhex),
    "deque": (deque, lambda value: [[*value]], deque),
    "range": (range, lambda value: [value.start, value.stop, value.step], range),
    "Fraction": (Fraction, lambda value: [value.numerator, value.denominator], Fraction),
    "Decimal": (Decimal, lambda value: [str(value)], Decimal),
    "datetime": (datetime, lambda value: [value.isoformat()], datetime.fromisoformat),
    "date": (date, lambda value: [value.isoformat()], date.fromisoformat),
    "time": (time, lambda value: [value.isoformat()], time.fromisoformat),
    "timedelta": (timedelta, lambda v: [v.days, v.seconds, v.microseconds], timedelta),
}
LITERAL = ("tuple", "set", "frozenset", "dict", "bytes", "complex")  # of Python's own notation


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """Return what JSON can hold of plain data, and `other` of the rest. A value of a child of a
    class is one of that class; all but JSON's own kinds are dicts of one item.

    Example: encode([1, (2.5, None)], repr) gives [1, {"tuple": [[2.5, None]]}]
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode(item, other) for item in value]
    for name, (kind, arguments, _) in KINDS.items():
        if isinstance(value, kind):
            return {name: encode(arguments(value), other)}
    return other(value)


def decode(value: Any, make: Callable[[str, Any], Any], kinds: Container[str] = KINDS) -> Any:
    """Read the data behind parsed JSON of `encode`; raises an exception for other JSON.

    make(kind, content): whatever is of none of the kinds.
    """
    if isinstance(value, list):
        return [decode(item, make, kinds) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind not in kinds:
        return make(kind, content)
    return KINDS[kind][2](*decode(content, make, kinds))


def library(path: str) -> Any:
    """Return the member of a module of Python's library, by its path."""
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)


# ---------------------------------------------------------------- beside the solution


def solve() -> None:
    """Answer operations on the solution until there are no more. The solution's own input is empty,
    its output discarded."""
    sys.set_int_max_str_digits(0)
    requests, replies = private_streams()
    solution = _Solution()
    # -S has neither; mypy knows both
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    # definitions of the problem, for a solution that relies on them
    for statement in json.loads(read("before.json")):
        with contextlib.suppress(BaseException):
            exec(statement, solution.names)
    failed = solution.answer(
        lambda: exec(compile(read("solution.py"), "solution.py", "exec"), solution.names)
    )
    broken = failed if failed.startswith('{"error"') else ""
    for line in requests:
        replies.write((broken or solution.answer(partial(solution.act, line))) + "\n")
        replies.flush()


class _Solution:
    """The solution's names, and its objects by the numbers that the tester knows them by."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "solution"}
        self.objects: list[Any] = []
        # a copy: a solution may replace those of the modules
        self._operations = {**vars(operator), **vars(builtins), "eval": self._evaluate}
        self._operations["call"] = lambda function, args, kwargs: [function(*args, **kwargs), args]
        self._operations["first"] = lambda items: [*islice(items, 1)]

    def answer(self, act: Callable[[], Any]) -> str:
        try:
            return json.dumps({"value": encode(act(), self._other)})
        except BaseException as error:  # a solution may raise anything
            with contextlib.suppress(BaseException):
                parts = [type(error), str(error)[:500], [*error.args], dict(vars(error))]
                return json.dumps({"error": encode(parts, self._other)})
            return '{"error": []}'

    def act(self, line: str) -> Any:
        operation, arguments = json.loads(line)
        return self._operations[operation](*decode(arguments, self._make))

    def _evaluate(self, expression: str) -> Any:
        """Evaluate; a missing name may be a method of `Solution`, as on LeetCode and in APPS."""
        names = self.names
        try:
            return eval(expression, names)
        except NameError as error:
            name = error.name
            if not name or name in names or "Solution" not in names:
                raise
            names[name] = getattr(names["Solution"](), name)
            return eval(expression, names)

    def _other(self, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, Exception):
            classes = [kind for kind in value.__mro__ if kind is not object]
            return {"exception": [f"{kind.__module__}.{kind.__qualname__}" for kind in classes]}
        self.objects.append(value)
        return {"object": len(self.objects) - 1}

    def _make(self, kind: str, content: Any) -> Any:
        return self.objects[content] if kind == "object" else library(content)


def read(name: str) -> str:
    with open(name, encoding="utf-8") as file:
        return file.read()


def private_streams() -> tuple[Any, Any]:
    """Move stdin and stdout to other numbers; 0 and 1 are then /dev/null."""
    lines, out = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return lines, out


if __name__ == "__main__":
    solve()
