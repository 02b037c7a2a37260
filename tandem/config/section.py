"""The base of all sections of the configuration."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, WrapValidator
from pydantic_core import PydanticCustomError

from tandem.registry import names


class Section(BaseModel):
    """A table of a recipe: strictly typed, frozen, without unknown keys, infinities or NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def contradictions(self) -> Iterator[str]:
        """Yield "section.key: reason" for values that are valid by themselves and make no sense
        together."""
        return iter(())


# of a key that has choices: a user's function is one too, as "my.py:NAME"
OR_FUNCTION = WrapValidator(
    lambda value, choices: value if isinstance(value, str) and ":" in value else choices(value)
)


def name_of(kind: str, *others: str) -> BeforeValidator:
    """Make the validator of a key that names an object of the registry's kind, or is another
    word."""

    return BeforeValidator(partial(_require_name, kind, others))


def _require_name(kind: str, others: tuple[str, ...], value: Any) -> Any:
    known = [*others, *names(kind)]
    if value not in known:
        raise PydanticCustomError("literal_error", f"expected one of {known}")  # type: ignore[arg-type]
    return value


def off_or(accepts: Callable[[float], bool], expected: str) -> AfterValidator:
    """Make the validator of a number that is 0 for off, or one that is accepted."""

    def check(value: float) -> float:
        if value and not accepts(value):
            raise ValueError(f"expected {expected}, or 0 for off")
        return value

    return AfterValidator(check)
