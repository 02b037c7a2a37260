"""A program inside the sandbox, beside a model's code; code_tester.py shares its values as JSON.

    python code_inside.py    loads solution.py, then answers each line of stdin, an expression in
                             quotes, with JSON: {"value": ...}, or {"error": [class, text, args,
                             attributes]}

Only plain data comes back, so the solution can reach no expected value, verdict, frame, checker or
exit code. The solution controls all of `solve`; its lines are trusted to be values, and no more.
"""

import builtins
import contextlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

INVOKE, OBJECTS, PYTHON = "__invoke__", "__objects__", "__python__"
COPY, SAME = "__on_a_copy__", "__same__"


# ---------------------------------------------------------------- values as JSON


def encode(value: Any, objects: list[Any]) -> Any:
    """Return what JSON can hold of plain data, else its number in objects; other kinds are dicts of
    one item.

    A child of a number, text or tuple (a namedtuple) is data and an object: {"child": [data, n]}.

    Example: encode([1, (2.5, None)], []) gives [1, {"tuple": [2.5, None]}]
    """
    if value is None or type(value) is bool:
        return value
    for kind in (int, float, complex, str, bytes, tuple, frozenset):
        if isinstance(value, kind):
            data = _plain(kind, value, objects)
            if type(value) is kind:
                return data
            objects.append(value)
            return {"child": [data, len(objects) - 1]}
    if isinstance(value, (list, set)):
        return _plain(list if isinstance(value, list) else set, value, objects)
    if isinstance(value, dict):
        pairs = dict.items(value)
        return {"dict": [[encode(k, objects), encode(v, objects)] for k, v in pairs]}
    if isinstance(value, type) and issubclass(value, Exception):
        return {"exception": encode(_lineage(value), [])}
    kind_of = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind_of in STANDARD:
        return {kind_of: encode([*STANDARD[kind_of](value)], objects)}
    for number, item in enumerate(objects):
        if item is value:
            return {"object": number}
    objects.append(value)
    return {"object": len(objects) - 1}


def _plain(kind: Any, value: Any, objects: list[Any]) -> Any:
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
    items = [encode(item, objects) for item in parts]
    return items if kind is list else {kind.__name__: items}


def _lineage(kind: Any) -> list[Any]:
    """List the name of a class, and the lineages of its bases."""
    bases = (base for base in kind.__bases__ if base is not object)
    return [f"{kind.__module__}.{kind.__qualname__}", *map(_lineage, bases)]


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


# ---------------------------------------------------------------- beside the solution


def solve() -> None:
    """Answer expressions about the solution until there are no more. The solution's own input is
    empty, its output discarded."""
    sys.set_int_max_str_digits(0)
    requests, replies = private_streams()
    objects: list[Any] = []
    namespace: dict[str, Any] = {"__name__": "solution", OBJECTS: objects}
    # the result of a call, and its arguments after it
    namespace[INVOKE] = lambda function, args, kwargs: [function(*args, **kwargs), args]
    # -S has neither; mypy knows both
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    namespace[PYTHON] = dict(vars(builtins))  # a solution may have a `list` of its own
    # definitions of the problem, for a solution that relies on them
    for line in read("before.txt").splitlines():
        with contextlib.suppress(BaseException):
            exec(eval(line), namespace)
    failed = _attempt(
        lambda: exec(compile(read("solution.py"), "solution.py", "exec"), namespace), []
    )
    for line in requests:
        expression = str(eval(line))
        broken = failed if failed.startswith('{"error"') else ""
        replies.write((broken or _attempt(partial(_value, expression, namespace), objects)) + "\n")
        replies.flush()


def _value(expression: str, namespace: dict[str, Any]) -> Any:
    """Evaluate; a missing name may be a method of `Solution`, as on LeetCode and in APPS."""
    try:
        return eval(expression, namespace)
    except NameError as error:
        name = error.name
        if not name or name in namespace or "Solution" not in namespace:
            raise
        namespace[name] = getattr(namespace["Solution"](), name)
        return eval(expression, namespace)


def read(name: str) -> str:
    with open(name, encoding="utf-8") as file:
        return file.read()


def _attempt(act: Callable[[], Any], objects: list[Any]) -> str:
    try:
        return json.dumps({"value": encode(act(), objects)})
    except BaseException as error:  # a solution may raise anything
        with contextlib.suppress(BaseException):
            parts = [type(error), str(error)[:500], [*error.args], dict(vars(error))]
            return json.dumps({"error": encode(parts, objects)})
        return '{"error": []}'


def private_streams() -> tuple[Any, Any]:
    """Move stdin and stdout to other numbers; 0 and 1 are then /dev/null."""
    lines, out = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return lines, out


if __name__ == "__main__":
    solve()
