"""Arguments and options that several commands share, and commands whose options are a dataclass."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Argument, Option

from tandem.config.schema import Config

# --help does not show their defaults, which mean that nothing is given
unset, argument = partial(Option, show_default=False), partial(Argument, show_default=False)

Recipe = Annotated[str, argument(help="TOML recipe, e.g. my.toml")]
Overrides = Annotated[list[str] | None, argument(help="section.field=value, any number")]
Fresh = Annotated[bool, Option("--fresh", help="start over; the old output is kept beside it")]
Run = Annotated[Path, argument(help="run folder")]


def run_folder(config: Config, recipe: str, command: str) -> Path:
    """Return the run folder of a recipe."""
    return Path(config.run.folder or f"runs/{Path(recipe).stem}-{command}")


def command_of(options: type, run: Callable[[Any], None]) -> Callable[..., None]:
    """Make a command of a function of a dataclass, whose fields are the command's options."""

    def command(**given: Any) -> None:
        run(options(**given))

    command.__doc__ = run.__doc__
    command.__annotations__ = get_type_hints(options, include_extras=True)
    command.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
    return command
