"""A stand-in for pytest beside the tests of a data set, in the sandbox: the parts that such tests
use.

raises, approx, fail, skip and mark.parametrize work as in pytest; other marks do nothing. It is a
program of the sandbox, like code_inside.py, and imports nothing of Tandem.

    python -c "from tandem.rewards.code_pytest import approx; print(0.1 + 0.2 == approx(0.3))"
"""

import math
import re
from typing import Any


class raises:
    """A context, `with raises(ValueError, match="..."):`, that fails without such an exception."""

    value: BaseException

    def __init__(self, kinds: Any, match: str = ""):
        self.kinds, self.match = kinds, match

    def __enter__(self) -> "raises":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if kind is None:
            raise AssertionError(f"did not raise {self.kinds}")
        self.value = error
        return issubclass(kind, self.kinds) and bool(re.search(self.match or "", str(error)))


class approx:
    """A number equal to others within 1e-6 of it, relatively, or 1e-12; a list, tuple or dict of
    numbers entry by entry."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None):
        self.expected, self.rel, self.abs = (
            expected,
            1e-6 if rel is None else rel,
            1e-12 if abs is None else abs,
        )

    def __eq__(self, found: object) -> bool:
        expected = self.expected
        if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
            return len(found) == len(expected) and all(map(self._same, expected, found))
        if isinstance(expected, dict) and isinstance(found, dict):
            return found.keys() == expected.keys() and all(
                self._same(expected[key], found[key]) for key in expected
            )
        return self._same(expected, found)

    __hash__ = None  # type: ignore[assignment]

    def _same(self, expected: Any, found: Any) -> bool:
        if isinstance(expected, int | float) and isinstance(found, int | float):
            return math.isclose(found, expected, rel_tol=self.rel, abs_tol=self.abs)
        return bool(found == expected)


class _Marks:
    def parametrize(self, names: str | list[str], values: list[Any], **_: Any) -> Any:
        """Return a decorator for a test that runs once with each row of values; `cases` holds the
        rows."""
        columns = (
            [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        )
        rows = [
            dict(zip(columns, row if len(columns) > 1 else [row], strict=True)) for row in values
        ]

        def marked(test: Any) -> Any:
            test.cases = [
                {**row, **other} for other in getattr(test, "cases", [{}]) for row in rows
            ]
            return test

        return marked

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **_: args[0] if args and callable(args[0]) else lambda test: test


mark = _Marks()


def fail(reason: str = "") -> None:
    raise AssertionError(reason)


def skip(reason: str = "") -> None:
    """Fail the test, as a skipped one proves nothing."""
    raise AssertionError(f"skipped: {reason}")


def main(*_: Any) -> int:
    """Do nothing: code_inside.py calls the tests."""
    return 0
