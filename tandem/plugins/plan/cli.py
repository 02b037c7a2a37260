"""The arguments of `tandem plan`."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from tandem.cli.arguments import Overrides, argument, run_folder, unset
from tandem.config.recipe import describe, load_config
from tandem.runtime.errors import UserError


def plan(
    recipe: Annotated[str | None, argument(help="TOML recipe")] = None,
    overrides: Overrides = None,
    command: Annotated[str, Option("--for", help="train, sft, dpo, rm or distill")] = "train",
    keys: Annotated[
        bool, Option("--keys", help="list every configuration key with its default and meaning")
    ] = False,
    values: Annotated[
        bool, Option("--values", help="every value of the run with its origin, the default too")
    ] = False,
    json: Annotated[Path | None, unset(help="also write the figures to this file")] = None,
    gpus: Annotated[
        int | None, Option(help="instead: the fastest meshes of so many GPUs, by arithmetic")
    ] = None,
    gpu: Annotated[str, Option(help="with --gpus: a100, h100, h200 or b200")] = "h200",
) -> None:
    """Check whether a run could start (exit code 0, else 2). Values and their origin, data, memory,
    disk. No weights are loaded."""
    if gpus is not None and recipe is None:
        what = "meshes are computed for the model of a recipe"
        raise UserError(what, where="--gpus", next=f"tandem plan RECIPE --gpus {gpus}")
    if keys or recipe is None:
        from tandem.cli.progress import print_table

        print_table(("key", "default", "meaning"), describe())
        return
    config = load_config(recipe, overrides or [])
    if gpus is not None:
        from tandem.plugins.plan.meshes import plan_gpus

        plan_gpus(config, command, gpus, gpu)
        return
    from tandem.plugins.plan import command as plan
    from tandem.plugins.plan.origins import origins

    found = origins(recipe, overrides or [])
    folder = run_folder(config, recipe, command)
    sys.exit(plan.plan(config, command, folder, found, every=values, out=json))
