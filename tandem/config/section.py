"""The base of all sections of the configuration."""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of a recipe: strictly typed, frozen, without unknown keys, infinities or NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def contradictions(self) -> Iterator[str]:
        """Yield "section.key: reason" for values that are valid by themselves and make no sense
        together."""
        yield from ()
