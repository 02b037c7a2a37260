"""Limits of a chat template: the work of one rendering, and the size of everything that it makes.

    work    each block of statements that runs, call, filter and operator is paid for, by the sizes of what goes in and comes out
    size    what can make a text or list longer than those it was made of is priced before it runs; what has no price is refused

So memory and time have a bound although templates are programs. The unit is a character. It does
not know how templates are compiled (template.py).
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

LONGEST_TEXT = 4 << 20  # characters of one rendered chat, or of a part of it
WORK = 1 << 27  # of one rendering: a few seconds, and at most some 128 MiB
# characters that a part of a template, a call, and an item of a list count as
NODE, CALL, ITEM = 32, 256, 8
MAX_BITS = 1 << 16  # of a whole number
MAX_INDENT, MAX_CHARS = 100, 1000  # of JSON; to trim

SIZED = (str, list, tuple)
CONTAINERS = (list, tuple, dict, set)
PARTED: tuple[Any, ...] = (*CONTAINERS, type({}.items()), type({}.values()), type({}.keys()))

# the arguments of a method or filter -> characters that it makes at most
Bound = Callable[..., int]


class TextTooLong(Exception):
    """A text of the template grew beyond LONGEST_TEXT."""


class TooMuchWork(Exception):
    """The rendering took more than WORK."""


class Budget(threading.local):
    """The work that is left to the rendering of this thread."""

    def __init__(self) -> None:
        self.left = WORK

    def spend(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise TooMuchWork

    def paid(self, value: Any) -> Any:
        """A value that is going to be looked through."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, PARTED):
            self.weigh(value)
        return value

    def searched(self, value: Any) -> Any:
        """A value in which another one is going to be searched; a dict is not looked through for
        that."""
        return value if isinstance(value, dict) else self.paid(value)

    def sliced(self, value: Any) -> Any:
        """A copy of a part of something."""
        if isinstance(value, SIZED):
            self.spend(ITEM * len(value))
        return value

    def made(self, value: Any) -> Any:
        """A value that has just been made."""
        kind = type(value)
        if kind is bool or value is None:
            return value
        if kind is int:
            within_bits(value.bit_length())
            return value
        if isinstance(value, str):
            length = len(value)
            self.spend(ITEM + (length if value.isascii() else 4 * length))  # as much memory
            within(length)
        elif isinstance(value, CONTAINERS):
            self.weigh(value)
        elif kind is GeneratorType:
            return self.each(value)
        return value

    def each(self, values: Iterable[Any], work: int = CALL) -> Iterator[Any]:
        """Pay for every item as it comes."""
        for value in values:
            self.spend(work)
            yield value

    def weigh(self, value: Any) -> int:
        """The characters that a value has, its parts included, each as often as it is there. A list
        may hold one text a million times: it is no larger for that, but what prints or compares it
        is at it for so long."""
        weight = ITEM
        rest: list[Any] = [value]
        while rest:
            item = rest.pop()
            if isinstance(item, str):
                weight += len(item)
            elif isinstance(item, dict):
                weight += 2 * ITEM * len(item)
                rest += [*item, *item.values()] if weight <= LONGEST_TEXT else []
            elif isinstance(item, PARTED):
                weight += ITEM * (1 + len(item))
                rest += item if weight <= LONGEST_TEXT else []
            elif isinstance(item, Namespace):  # it can be changed afterwards, and hold itself
                raise SecurityError("a namespace can be in no list, and in no text")
            within(weight)
        self.spend(2 * weight)
        return weight

    def operate(self, operator: str, left: Any, right: Any) -> None:
        """Pay for a binary operator before it is applied."""
        self.spend(NODE)
        if operator == "%" and isinstance(left, str):
            within(self.formatted(left, right))
        elif operator == "+" and isinstance(left, SIZED) and isinstance(right, SIZED):
            within(len(left) + len(right))
        elif isinstance(left, int) and isinstance(right, int):
            times = right if operator == "**" else 1
            within_bits(left.bit_length() * times + (right.bit_length() if operator == "*" else 0))
        elif operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, SIZED) and isinstance(count, int):
                    within(len(text) * count)

    def formatted(self, text: str, values: Any) -> int:
        """The characters of `text % values` at most."""
        text = str(text)
        marks = re.findall(r"%(?:\([^)]*\))?([^a-zA-Z%]*)", text)
        if any("*" in mark for mark in marks):
            raise SecurityError("a format takes its width from an argument")
        widths = sum(_number(digits) for mark in marks for digits in re.findall(r"\d+", mark))
        return (
            len(text)
            + widths
            + self.weigh(values) * (len(marks) if isinstance(values, Mapping) else 1)
        )


def within(length: int) -> int:
    if length > LONGEST_TEXT:
        raise TextTooLong
    return length


def within_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise OverflowError(f"a whole number of more than {MAX_BITS} bits")


def check_width(text: str) -> None:
    """Refuse a format specification, as of `'{:>9}'.format(x)`, that widens beyond LONGEST_TEXT."""
    for digits in re.findall(r"\d+", text):
        within(_number(digits))


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 9 else LONGEST_TEXT + 1


# ---- methods of texts


def _like(text: str, *_: Any, **__: Any) -> int:
    return len(text)


def _padded(text: str, width: int = 80, *_: Any, **__: Any) -> int:
    return max(len(str(text)), width)


def _replaced(text: str, old: str, new: str, *_: Any, **__: Any) -> int:
    text, old, new = str(text), str(old), str(new)
    return len(text) + text.count(old) * max(0, len(new) - len(old))


def _joined(text: str, parts: Iterable[str]) -> int:
    return sum(len(part) + len(text) for part in parts)


def _expanded(text: str, tabsize: int = 8) -> int:
    return len(text) + text.count("\t") * tabsize


_LINEAR = (
    "capitalize",
    "casefold",
    "count",
    "endswith",
    "find",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "rfind",
    "rindex",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
)
METHODS: Mapping[type, Mapping[str, Bound]] = {
    str: dict.fromkeys(_LINEAR, _like)
    | dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded)
    | {"replace": _replaced, "join": _joined, "expandtabs": _expanded},
    dict: dict.fromkeys(("get", "items", "keys", "values", "copy"), _like),
    list: dict.fromkeys(("index", "count", "copy"), _like),
    tuple: dict.fromkeys(("index", "count"), _like),
}


# ---- filters


def _indented(text: str, width: int | str = 4, *_: Any, **__: Any) -> int:
    text = str(text)
    return len(text) + (1 + text.count("\n")) * (width if isinstance(width, int) else len(width))


def _separated(values: Iterable[Any], d: str = "", *_: Any, **__: Any) -> int:
    return sum(len(str(d)) for _ in values)


def _filled(values: Any, linecount: int, fill_with: Any = None) -> int:
    return 0 if fill_with is None else linecount


def _rounded(number: Any, precision: int = 0, *_: Any, **__: Any) -> int:
    within_bits(abs(precision) << 8)
    return 0


def _ended(
    text: str, length: int = 255, killwords: bool = False, end: str = "...", *_: Any, **__: Any
) -> int:
    return len(str(text)) + len(end)


def _trimmed(text: str, chars: str | None = None) -> int:
    if len(chars or "") > MAX_CHARS:  # each character of the text may be looked for in all of them
        raise SecurityError(f"more than {MAX_CHARS} characters to trim")
    return len(str(text))


def _summed(values: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise SecurityError("a sum begins with a number")
    return 0


# Filters that look at no item, or at each as it is asked for.
LAZY = (
    "abs",
    "attr",
    "count",
    "d",
    "default",
    "first",
    "float",
    "int",
    "items",
    "last",
    "length",
    "list",
    "map",
    "reject",
    "rejectattr",
    "reverse",
    "round",
    "select",
    "selectattr",
    "slice",
    "batch",
)
_WHOLE = (
    "capitalize",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "forceescape",
    "groupby",
    "lower",
    "max",
    "min",
    "safe",
    "sort",
    "string",
    "title",
    "trim",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
)
# Filters of jinja that are missing here draw lots, or take far longer than their text is long.
FILTERS: Mapping[str, Bound | None] = {
    **dict.fromkeys(LAZY + _WHOLE),
    "batch": _filled,
    "center": _padded,
    "indent": _indented,
    "join": _separated,
    "replace": _replaced,
    "round": _rounded,
    "sum": _summed,
    "trim": _trimmed,
    "truncate": _ended,
}


# ---- tests, and what takes longer than its text is long

COMPARING_TESTS = (
    "in",
    "==",
    "eq",
    "equalto",
    "!=",
    "ne",
    ">",
    "gt",
    "greaterthan",
    "ge",
    ">=",
    "<",
    "lt",
    "lessthan",
    "<=",
    "le",
    "lower",
    "upper",
    "divisibleby",
)
# not in linear time
SEARCHING_BACKWARDS = ("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition", "rsplit")
