"""The first value in which a run differs from another run, or from its own replay.

A comparison is a generator that yields a Divergence for each pair of values that are not equal. Its
reader takes the first one and stops, so nothing behind it is computed. It does not know what is
compared: that is diff.py, replay.py and rescore.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

ABSENT = "none"


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A value that is not the same on both sides. A is the run as recorded, B the other run or the
    replay."""

    what: str
    a: str
    b: str
    also: str = ""  # the other differences


def compare(what: str, a: object, b: object) -> Iterator[Divergence]:
    """Yield a Divergence unless the values are equal. A string is shown as it is, another value by
    its repr."""
    if a != b:
        yield Divergence(what=what, a=_text(a), b=_text(b))


def compare_items(
    a: Mapping[str, object], b: Mapping[str, object], what: str = "{}"
) -> Iterator[Divergence]:
    """Compare the values of each key; what: the text of a Divergence, with {} for the key."""
    for key in {**a, **b}:
        yield from compare(what.format(key), a.get(key, ABSENT), b.get(key, ABSENT))


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)
