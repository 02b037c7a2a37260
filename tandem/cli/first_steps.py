"""The commands that come before a first run of one's own. They need no recipe. The registry has
them by name."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from tandem.cli.arguments import Fresh, Overrides, argument, unset
from tandem.config.recipe import load_config


def demo(
    overrides: Overrides = None,
    folder: Annotated[Path, Option(help="where data, model and runs go")] = Path("runs/demo"),
    seed: Annotated[int, Option(min=0, help="another seed: other data, model and draws")] = 0,
    fresh: Fresh = False,
) -> None:
    """Show the whole loop in two minutes: data, a tiny model, SFT, GRPO, evaluation, export."""
    from tandem.cli.demo import demo

    demo(folder, seed, fresh, overrides or [])


def init(
    folder: Annotated[Path, argument(help="the project: a new folder")],
    model: Annotated[str, unset(help="Hugging Face directory or hub name to train")] = "",
    tiny: Annotated[
        bool, Option("--tiny", help="a tiny random model and chats that warm it up; the default")
    ] = False,
) -> None:
    """Write a project that runs as it is: recipe, data, a reward of your own, a README."""
    from tandem.cli.init import init

    init(folder, model, tiny)


def tiny(
    folder: Annotated[Path, argument(help="where the model goes: a new folder")],
    sources: Annotated[
        list[str] | None, unset("--from", help="a data set whose characters it knows; any number")
    ] = None,
    vocab: Annotated[
        str, unset(help="characters; default: those of --from, or printable ASCII")
    ] = "",
    hidden: Annotated[int, Option(min=8, help="width of the model")] = 128,
    layers: Annotated[int, Option(min=1)] = 3,
    heads: Annotated[int, Option(min=1, help="attention heads")] = 4,
    kv_heads: Annotated[int, Option(min=1, help="key/value heads")] = 2,
    intermediate: Annotated[int, Option(min=1, help="width of the MLP")] = 640,
    context: Annotated[int, Option(min=8, help="tokens of the longest sequence")] = 256,
    images: Annotated[bool, Option("--images", help="it reads images: a Qwen2.5-VL")] = False,
    seed: Annotated[int, Option(min=0, help="the same seed gives the same weights")] = 0,
) -> None:
    """Make a tiny random model of characters, ready to train, in seconds, without a network."""
    from tandem.cli import tiny

    tiny.tiny(
        folder,
        sources=sources or [],
        vocab=vocab,
        images=images,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        max_tokens=context,
        seed=seed,
    )


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
    """Try a reward function or an environment on a few rows: score, parts of it, time."""
    from tandem.cli import try_out

    options = [f"data.train={data}"] * bool(data) + [f"model.path={model}"] * bool(model)
    config = load_config(recipe, [*try_out.overrides_of(what), *options, *(overrides or [])])
    sys.exit(1 if try_out.try_out(config, answer or [], rows) else 0)


def doctor(
    as_json: Annotated[bool, Option("--json", help="print one JSON document instead")] = False,
) -> None:
    """Check this machine: versions, exactness of the operators, reward workers, disk."""
    from tandem.cli import doctor

    sys.exit(doctor.doctor(as_json))
