"""The one error a user sees: what, where, found, expected, and the next command.

The command line prints it and exits with code 2; anything else that escapes is a bug, keeps its
traceback and exits with 1.
"""


class UserError(Exception):
    """A mistake in the user's input or surroundings, told in full.

    Example:
        UserError("the model directory does not exist", where="model.path (demo.toml)",
                  found="runs/warm/hf", expected="a Hugging Face model directory",
                  next="tandem sft recipes/demo.toml")
    """

    def __init__(
        self, what: str, *, where: str = "", found: str = "", expected: str = "", next: str = ""
    ):
        super().__init__(what)
        self.what, self.where, self.found, self.expected, self.next = (
            what,
            where,
            found,
            expected,
            next,
        )

    def __str__(self) -> str:
        rows = [
            ("where", self.where),
            ("found", self.found),
            ("expected", self.expected),
            ("next", self.next),
        ]
        return "\n".join([self.what, *(f"  {name + ':':<10}{text}" for name, text in rows if text)])


class InvariantError(UserError):
    """An invariant of Tandem's own that does not hold: told in full as well, but as the bug that it
    is, with its traceback."""
