"""The mistakes of all rows in the one error that a user sees.

Knows places, fields and counts. Does not know files, formats or what a row means.
"""

import json
from typing import Any

from tandem.runtime.errors import UserError

MAX_MISTAKES = 10


class RowError(Exception):
    """One mistake in one row. read_rows adds the file and the line."""

    def __init__(self, found: str, expected: str, *, field: str = "", next: str = ""):
        super().__init__(found)
        self.found, self.expected, self.field, self.next = found, expected, field, next


def show(value: Any) -> str:
    """Write a value for an error message: its JSON, or the kind and size of one that is too long to
    print."""
    match value:
        case None | bool():
            return json.dumps(value)
        case str():
            return f'text "{value[:40]}..."' if len(value) > 40 else f'"{value}"'
        case list():
            return f"a list of {len(value)}"
        case dict():
            return f"an object with {', '.join(list(value)[:5]) or 'no keys'}"
        case _:
            return str(value)[:60]


class Mistakes:
    """Mistakes grouped by their text, so that a column missing in 100,000 rows is one line."""

    def __init__(self, source: str, key: str):
        self.source, self.key = source, key
        # (field, found, expected) -> first place, rows
        self.places: dict[tuple[str, str, str], tuple[str, int]] = {}
        self.next = ""

    def add(self, place: str, error: RowError) -> bool:
        """Add a mistake; tell whether more may come."""
        mistake = (error.field, error.found, error.expected)
        first, rows = self.places.get(mistake, (place, 0))
        self.places[mistake] = (first, rows + 1)
        self.next = self.next or error.next
        return len(self.places) < MAX_MISTAKES

    def raise_any(self) -> None:
        if not self.places:
            return
        rows = sum(count for _, count in self.places.values())
        what = f"{self.key} has {'a row' if rows == 1 else f'{rows:,} rows'} that cannot be used"
        if len(self.places) == 1:
            [((field, found, expected), (place, _))] = self.places.items()
            raise UserError(
                what,
                where=self._where(place, field, rows),
                found=found,
                expected=expected,
                next=self.next,
            )
        what = f"{what} (reading stopped there)" if len(self.places) == MAX_MISTAKES else what
        lines = [
            f"  - {self._where(place, field, count)}: found {found}, expected {expected}"
            for (field, found, expected), (place, count) in self.places.items()
        ]
        raise UserError("\n".join([what, *lines]), next=self.next or "correct these rows")

    def _where(self, place: str, field: str, rows: int) -> str:
        more = f" (and {rows - 1:,} more)" if rows > 1 else ""
        return f"{self.source}{place}{', ' * bool(field)}{field}{more}"
