"""`tandem view`, `tandem report` and `tandem plot`: runs as pages, as a file and as pictures. What
takes long to import comes after the user's mistakes."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from typer import Argument, Option

from tandem.cli.arguments import Run, argument, unset
from tandem.run_folder.files import require_run
from tandem.runtime.disk import write_atomic
from tandem.runtime.errors import UserError
from tandem.runtime.wording import counted
from tandem.serve.listen import bound, require_token, url_of


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
    if not runs.is_dir():
        raise UserError(
            "there are no runs to view",
            where=str(runs),
            found="no such folder",
            next="tandem demo makes one; or tandem view FOLDER",
        )
    require_token(host, token, "TANDEM_VIEW_TOKEN")
    from tandem.plugins.view.app import make_server
    from tandem.plugins.view.runs import Runs

    with bound(host, port) as sock:
        end = f"/?token={quote(token, safe='')}" if token else "/"
        line = f"{counted(len(Runs(runs).list()), 'runs')} of {runs} on {url_of(sock)}{end}"
        server = make_server(runs, token, lambda: print(line, flush=True))
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it has stopped
            server.run(sockets=[sock])


def report(
    run: Run,
    out: Annotated[Path | None, unset("-o", "--out", help="default: RUN/report.html")] = None,
) -> None:
    """Write a run as one HTML file. Curves, chosen episodes, configuration."""
    from tandem.plugins.view.report import report as page

    [one] = _open([run])
    target = out or run / "report.html"
    write_atomic(target, page(one).encode())
    print(target)


def plot(
    runs: Annotated[list[Path], argument(help="run folders")],
    out: Annotated[Path, unset("-o", "--out", help="FILE.svg or FILE.png")],
    key: Annotated[list[str] | None, unset(help="a column, e.g. reward; any number")] = None,
) -> None:
    """Draw the curves of runs as an SVG file. With the extra `png`, also as PNG."""
    from tandem.plugins.view.png import to_png
    from tandem.plugins.view.report import panels
    from tandem.plugins.view.svg import figure

    if out.suffix not in (".svg", ".png"):
        raise UserError(
            "curves are written as SVG or PNG",
            where="-o",
            found=str(out),
            next=f"tandem plot RUN -o {out.with_suffix('.svg')}",
        )
    drawn = panels(_open(runs), key or [])
    if not drawn:
        raise UserError(
            "there is nothing to draw yet",
            where=", ".join(map(str, runs)),
            next="wait for its first step",
        )
    picture = figure(drawn)
    write_atomic(out, to_png(picture) if out.suffix == ".png" else picture.encode())
    print(out)


def _open(folders: Sequence[Path]) -> list[Any]:
    """Open runs (runs.py: Run), each named by as much of its path as it needs; warn of damaged
    rows. Raises UserError for other folders."""
    from tandem.plugins.view.runs import Run

    runs = []
    for folder in folders:
        require_run(folder)
        name = "/".join(part for part in folder.resolve().parts[-2:] if part != "runs")
        run = Run(folder, name)
        run.refresh()
        if broken := run.metrics.broken + run.timings.broken:
            print(f"{folder}: {broken} rows cannot be read, and are left out", file=sys.stderr)
        runs.append(run)
    return runs
