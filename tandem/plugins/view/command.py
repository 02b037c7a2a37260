"""`tandem view`, `tandem report` and `tandem plot`: runs as pages, as a file and as pictures."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from tandem.cli.progress import print_lines
from tandem.plugins.view.png import to_png
from tandem.plugins.view.report import panels
from tandem.plugins.view.report import report as report_page
from tandem.plugins.view.runs import Run, Runs
from tandem.plugins.view.svg import figure
from tandem.run_folder.files import require_run
from tandem.runtime.disk import write_atomic
from tandem.runtime.errors import UserError
from tandem.runtime.wording import counted
from tandem.serve.listen import bound, require_token, url_of


def view(root: Path, host: str, port: int, token: str) -> None:
    """Serve the pages until SIGINT or SIGTERM."""
    if not root.is_dir():
        raise UserError(
            "there are no runs to view",
            where=str(root),
            found="no such folder",
            next="tandem demo makes one; or tandem view FOLDER",
        )
    require_token(host, token, "TANDEM_VIEW_TOKEN")
    from tandem.plugins.view.app import make_server  # after the mistakes: it takes half a second

    with bound(host, port) as sock:
        end = f"/?token={quote(token, safe='')}" if token else "/"
        line = f"{counted(len(Runs(root).list()), 'runs')} of {root} on {url_of(sock)}{end}"
        server = make_server(root, token, lambda: print(line, flush=True))
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it has stopped
            server.run(sockets=[sock])


def report(folder: Path, out: Path | None) -> None:
    """Write the HTML file of a run."""
    [run] = _open([folder])
    target = out or folder / "report.html"
    write_atomic(target, report_page(run).encode())
    print_lines([f"{target}"])


def plot(folders: Sequence[Path], out: Path, keys: Sequence[str]) -> None:
    """Write curves of runs as an SVG or PNG file."""
    if out.suffix not in (".svg", ".png"):
        raise UserError(
            "curves are written as SVG or PNG",
            where="-o",
            found=str(out),
            next=f"tandem plot RUN -o {out.with_suffix('.svg')}",
        )
    drawn = panels(_open(folders), keys)
    if not drawn:
        raise UserError(
            "there is nothing to draw yet",
            where=", ".join(map(str, folders)),
            next="wait for its first step",
        )
    picture = figure(drawn)
    write_atomic(out, to_png(picture) if out.suffix == ".png" else picture.encode())
    print_lines([f"{out}"])


def _open(folders: Sequence[Path]) -> list[Run]:
    """Read runs, each named by as much of its path as it needs. Raises UserError for other folders,
    warns of damaged rows."""
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
