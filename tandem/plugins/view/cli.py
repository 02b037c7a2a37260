"""The arguments of `tandem view`, `tandem report` and `tandem plot`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from tandem.cli.arguments import Run, argument, unset


def view(
    runs: Annotated[Path, Argument(help="folder of runs, or a run")] = Path("runs"),
    host: Annotated[
        str, Option(help="address to listen on; one that other machines reach needs a token")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: any that is free")] = 8400,
    token: Annotated[
        str, unset(envvar="TANDEM_VIEW_TOKEN", help="what a browser must send once")
    ] = "",
) -> None:
    """Look at runs in a browser, live. Curves, every episode and token; docs/guide/view.md."""
    from tandem.plugins.view import command as view

    view.view(runs, host, port, token)


def report(
    run: Run,
    out: Annotated[Path | None, unset("-o", "--out", help="default: RUN/report.html")] = None,
) -> None:
    """Write a run as one HTML file. Curves, chosen episodes, configuration."""
    from tandem.plugins.view import command as view

    view.report(run, out)


def plot(
    runs: Annotated[list[Path], argument(help="run folders")],
    out: Annotated[Path, unset("-o", "--out", help="FILE.svg or FILE.png")],
    key: Annotated[list[str] | None, unset(help="a column, e.g. reward; any number")] = None,
) -> None:
    """Draw the curves of runs as an SVG file. With the extra `png`, also as PNG."""
    from tandem.plugins.view import command as view

    view.plot(runs, out, key or [])
