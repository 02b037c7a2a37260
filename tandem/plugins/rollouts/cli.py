"""The arguments of `tandem rollout` and `tandem try`."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from tandem.cli.arguments import Fresh, Overrides, Recipe, argument, unset
from tandem.config.recipe import load_config


def rollout(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, unset(help="FILE.jsonl, or a folder for Parquet files; default: runs/rollout")
    ] = None,
    fresh: Fresh = False,
    keep: Annotated[
        str,
        unset(
            metavar="LOW:HIGH",
            help="also write the problems whose mean reward lies in that range, "
            "as <out>.kept.jsonl",
        ),
    ] = "",
) -> None:
    """Generate and score episodes of the training problems. The same command resumes."""
    config = load_config(recipe, overrides or [])
    from tandem.plugins.rollouts import rollout

    rollout.rollout(config, out, fresh, rollout.parse_range(keep) if keep else None)


def try_out(
    what: Annotated[
        str,
        argument(
            help="a reward function (my.py:score, answer) or an environment (my.py:Shop, guess)"
        ),
    ],
    overrides: Overrides = None,
    data: Annotated[str, unset(help="problems")] = "",
    model: Annotated[str, unset(help="model that answers; default: you do")] = "",
    answer: Annotated[
        list[str] | None, Option(help="an answer instead of typing; once a turn, for every row")
    ] = None,
    rows: Annotated[int, Option(min=1, help="how many rows")] = 3,
    recipe: Annotated[str | None, unset(help="TOML recipe for everything else")] = None,
) -> None:
    """Try a reward or an environment on a few rows. See the score, its parts, the time."""
    from tandem.plugins.rollouts import try_out

    options = [f"data.train={data}"] * bool(data) + [f"model.path={model}"] * bool(model)
    config = load_config(recipe, [*try_out.overrides_of(what), *options, *(overrides or [])])
    sys.exit(1 if try_out.try_out(config, answer or [], rows) else 0)
