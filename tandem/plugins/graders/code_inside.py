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
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

FLUSH, SAME = "__flush__", "__same__"  # names that a script gets (code_tests.across_the_line)
Other = Callable[[Any], Any]  # what no plain data is -> JSON

# ---------------------------------------------------------------- values as JSON


def encode(value: Any, other: Other) -> Any:
    """Return what JSON can hold of plain data, and `other` of the rest; all but JSON's own kinds
    are dicts of one item.

    A child of a number, text or tuple (a namedtuple) is both: {"child": [data, other]}.

    Example: encode([1, (2.5, None)], repr) gives [1, {"tuple": [2.5, None]}]
    """
    if value is None or type(value) is bool:
        return value
    for kind in (int, float, complex, str, bytes, tuple, frozenset):
        if isinstance(value, kind):
            data = _plain(kind, value, other)
            return data if type(value) is kind else {"child": [data, other(value)]}
    if isinstance(value, (list, set)):
        return _plain(list if isinstance(value, list) else set, value, other)
    if isinstance(value, dict):
        pairs = dict.items(value)
        return {"dict": [[encode(k, other), encode(v, other)] for k, v in pairs]}
    kind_of = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind_of in STANDARD:
        return {kind_of: encode([*STANDARD[kind_of](value)], other)}
    return other(value)


def _plain(kind: Any, value: Any, other: Other) -> Any:
    """Return what JSON can hold of a value of Python's own kind, or of a child of it."""
    if kind is str:
        return str.__str__(value)
    if kind is int:
        fits = -(2**63) <= value < 2**63
        return int.__pos__(value) if fits else {"int": int.__format__(value, "x")}
    if kind is float:
        text = float.__repr__(value)
        return {"float": text} if text in FLOATS else float.__pos__(value)
    if kind is bytes:
        return {"bytes": bytes.hex(value)}
    parts = (value.real, value.imag) if kind is complex else kind.__iter__(value)
    items = [encode(item, other) for item in parts]
    return items if kind is list else {kind.__name__: items}


# Arguments that make a value of a standard class again.
STANDARD: dict[str, Callable[[Any], Any]] = {
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.slice": lambda value: (value.start, value.stop, value.step),
    "builtins.bytearray": lambda value: (bytes(value),),
    "collections.deque": lambda value: (list(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "decimal.Decimal": lambda value: (str(value),),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.datetime": lambda value: (*value.timetuple()[:6], value.microsecond, value.tzinfo),
    "datetime.time": lambda value: (
        *(value.hour, value.minute, value.second, value.microsecond, value.tzinfo),
    ),
    "datetime.timezone": lambda value: (value.utcoffset(None),),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
}


def decode(value: Any, make: Callable[[str, Any], Any]) -> Any:
    """Read the data behind parsed JSON of `encode`; raises an exception for other JSON.

    make(kind, content): whatever is no plain data.
    """
    if isinstance(value, list):
        return [decode(item, make) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in COLLECTIONS:
        return COLLECTIONS[kind](decode(item, make) for item in content)
    if kind == "dict":
        return {decode(key, make): decode(item, make) for key, item in content}
    if kind == "complex":
        return complex(*decode(content, make))
    return READERS[kind](content) if kind in READERS else make(kind, content)


COLLECTIONS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
FLOATS = {text: float(text) for text in ("nan", "inf", "-inf")}
READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda digits: int(digits, 16),  # decimal digits are slow
    "float": lambda text: FLOATS[text],
    "bytes": bytes.fromhex,
}


def standard(kind: str, content: Any, make: Callable[[str, Any], Any]) -> Any:
    """Make a value of STANDARD again. Raises ValueError for another kind."""
    if kind not in STANDARD:
        raise ValueError(f"no value is of kind {kind!r}")
    return library(kind)(*decode(content, make))


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
            return {"exception": _lineage(value)}
        numbers = [number for number, item in enumerate(self.objects) if item is value]
        if not numbers:
            self.objects.append(value)
        return {"object": (numbers or [len(self.objects) - 1])[0]}

    def _make(self, kind: str, content: Any) -> Any:
        match kind:
            case "object":
                return self.objects[content]
            case "child":
                return decode(content[1], self._make)
            case "library":
                return library(content)
        return standard(kind, content, self._make)


def _lineage(kind: Any) -> list[Any]:
    """List the name of a class, and the lineages of its bases."""
    bases = (base for base in kind.__bases__ if base is not object)
    return [f"{kind.__module__}.{kind.__qualname__}", *map(_lineage, bases)]


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
