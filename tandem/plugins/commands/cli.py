"""The arguments of `tandem eval`, `export`, `status` and `show`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from tandem.cli.arguments import Overrides, Recipe, Run, unset
from tandem.config.recipe import load_config


def evaluate(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, Option(help="write the metrics to this JSON file, and the answers beside it")
    ] = None,
    fresh: Annotated[bool, Option("--fresh", help="ask again: answers beside --out go")] = False,
) -> None:
    """Evaluate a model on the held-out problems. With --out the same command resumes."""
    config = load_config(recipe, overrides or [])
    from tandem.plugins.commands import eval

    eval.evaluate(config, out, fresh)


def export(
    run: Run,
    step: Annotated[int | None, Option(help="checkpoint to export; default: the newest")] = None,
    out: Annotated[
        Path | None, Option(help="target; default: <run>/hf/step_N, or <run>/adapter/step_N")
    ] = None,
    adapter: Annotated[
        bool, Option("--adapter", help="the LoRA adapter alone, in PEFT's format")
    ] = False,
    best: Annotated[
        bool, Option("--best", help="the best held-out reward's, of a run with eval.keep_best")
    ] = False,
    max_shard_size: Annotated[
        str, Option(help="a larger model becomes several files of that size, and an index")
    ] = "50GB",
    push: Annotated[
        str, unset(metavar="NAME", help="then upload it to the hub, as NAME or OWNER/NAME")
    ] = "",
) -> None:
    """Write a checkpoint as a Hugging Face directory. Stock transformers and vLLM read it."""
    from tandem.plugins.commands.export import export_run

    export_run(
        run, step, out, adapter=adapter, best=best, push_to=push, max_shard_size=max_shard_size
    )


def status(run: Run) -> None:
    """Tell whether a run goes on, and who runs where and does what."""
    from tandem.plugins.commands import show

    show.status(run)


def show(
    run: Run,
    step: Annotated[int | None, unset(min=0, help="default: the newest")] = None,
    best: Annotated[bool, Option("--best", help="highest rewards first")] = False,
    worst: Annotated[bool, Option("--worst", help="lowest rewards first")] = False,
    count: Annotated[int, Option(min=1, help="how many")] = 4,
    held_out: Annotated[bool, Option("--eval", help="those of the step's evaluation")] = False,
) -> None:
    """Show episodes of a step. Conversation, reward with its parts, and how each ended."""
    from tandem.plugins.commands import show

    show.show(run, step, best=best, worst=worst, count=count, held_out=held_out)
