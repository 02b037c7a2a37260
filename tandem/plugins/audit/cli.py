"""The arguments of `tandem replay`, `why` and `diff`."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from tandem.cli.arguments import Run, argument, unset


def replay(run: Run, step: Annotated[int, unset(help="as in metrics.jsonl, from 1 on")]) -> None:
    """Learn a step again and compare every bit. Print the first difference, if any."""
    from tandem.plugins.audit.show import replay_step

    sys.exit(replay_step(run, step))


def why(
    run: Run,
    episode: Annotated[str, unset(help="STEP:UID:SAMPLE; or UID, or STEP, for a list")] = "",
    count: Annotated[int, Option(min=1, help="lines of a list at most")] = 40,
    learning: Annotated[
        bool, Option(help="replay the step that trained it, for advantages and ratios")
    ] = True,
    json: Annotated[Path | None, unset(help="also write all of it to this file")] = None,
) -> None:
    """Explain what happened to an episode, and to each of its tokens."""
    from tandem.plugins.audit import show

    show.why(run, episode, count, learning=learning, out=json)


def diff(
    a: Annotated[Path, argument(help="run folder")], b: Annotated[Path, argument(help="another")]
) -> None:
    """Find where two runs part: first step, episode and token. Exit code 1 if they do."""
    from tandem.plugins.audit import show

    sys.exit(show.diff(a, b))
