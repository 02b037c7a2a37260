"""The arguments of `tandem generate`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from tandem.cli.arguments import argument, unset


def generate(
    task: Annotated[
        str, argument(help="a task, e.g. countdown, guess, reasoning_gym:NAME, verifiers:ID")
    ],
    out: Annotated[Path, unset(help="FILE.jsonl")],
    count: Annotated[int, Option(min=1, help="how many problems")] = 1000,
    difficulty: Annotated[int | None, unset(help="from 1 on; default: the task's own")] = None,
    seed: Annotated[int, Option(min=0, help="the same seed gives the same problems")] = 0,
    split: Annotated[str, Option(help="train or test, which never share a problem")] = "train",
    weights: Annotated[str, unset(help="of several reasoning_gym data sets, e.g. 2,1")] = "",
    force: Annotated[bool, Option("--force", help="replace the file")] = False,
) -> None:
    """Generate the problems of a built-in task, or of reasoning-gym."""
    from tandem.plugins.tasks import command

    command.generate(
        task,
        out,
        count=count,
        difficulty=difficulty,
        seed=seed,
        split=split,
        weights=weights,
        force=force,
    )
