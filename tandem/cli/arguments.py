"""Arguments and options that several commands share."""

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from tandem.config.schema import Config

# --help does not show their defaults, which mean that nothing is given
unset, argument = partial(Option, show_default=False), partial(Argument, show_default=False)

Recipe = Annotated[str, argument(help="TOML recipe, e.g. my.toml")]
Overrides = Annotated[list[str] | None, argument(help="section.field=value, any number")]
Fresh = Annotated[bool, Option("--fresh", help="start over; the old run folder is kept beside it")]
Run = Annotated[Path, argument(help="run folder")]


def run_folder(config: Config, recipe: str, command: str) -> Path:
    """Return the run folder of a recipe."""
    return Path(config.run.folder or f"runs/{Path(recipe).stem}-{command}")
