"""The error that a user sees (what, where, found, expected, next command), and its form for a bug.

The command line prints a UserError and exits with code 2; anything else that escapes is a bug,
keeps its traceback and exits with 1.
"""

import re
from collections.abc import Mapping
from numbers import Real
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs/guide"  # in a clone
PAGE = r"(?<![\w/.-])docs/(?=(guide|reference|concepts|develop)/)"
SITE = "https://github.com/tandem-rl/tandem/blob/main/docs/"


class UserError(Exception):
    """A mistake in the user's input or surroundings, with the facts needed to mend it.

    Example:
        UserError("the model directory does not exist", where="model.path (demo.toml)",
                  found="runs/warm/hf", expected="a Hugging Face model directory",
                  next="tandem sft recipes/demo.toml")
    """

    def __init__(
        self, what: str, *, where: str = "", found: str = "", expected: str = "", next: str = ""
    ):
        super().__init__(what)
        self.what, self.where, self.found = what, where, found
        self.expected, self.next = expected, next

    def __str__(self) -> str:
        rows = [(name, getattr(self, name)) for name in ("where", "found", "expected", "next")]
        lines = [self.what, *(f"  {name + ':':<10}{text}" for name, text in rows if text)]
        return re.sub(PAGE, "docs/" if PAGES.exists() else SITE, "\n".join(lines))


def not_installed(package: str, extra: str, *, where: str, instead: str = "") -> UserError:
    """Report a missing package. extra: that brings it; instead: a setting that needs it not."""
    return UserError(
        f"the package {package} is not installed",
        where=where,
        found=f"no {package}",
        next=f"pip install 'tandem-rl[{extra}]'" + f", or {instead}" * bool(instead),
    )


def require_range(values: object, limits: Mapping[str, tuple[float, float]]) -> None:
    """Raise UserError for the first attribute that is no number of its limits; None is none."""
    for name, (least, most) in limits.items():
        value = getattr(values, name)
        if value is not None and not (isinstance(value, Real) and least <= float(value) <= most):
            expected = f"a number from {least} to {most}"
            raise UserError("out of range", where=name, found=repr(value), expected=expected)


class InvariantError(UserError):
    """A broken invariant of Tandem's own: a bug, which keeps its traceback."""
