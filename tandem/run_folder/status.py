"""Status of a run, and the request for more or fewer rollout workers: two files of its folder.

    driver                                    another process
    ------                                    ---------------
    write_status  -- status.json -----------> read_status      `tandem status RUN`
    take_requested_workers <--- scale.json -- request_workers  `tandem scale RUN rollout=4`

Both are replaced as a whole. Neither is needed to resume, so both are dropped when a run starts
again: it has the workers of its config, and a request is for the process that runs when it is made.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.run_folder.files import read_file
from tandem.run_folder.lock import now
from tandem.runtime.disk import disk_errors
from tandem.runtime.errors import UserError

STATUS, REQUEST = "status.json", "scale.json"
ROLLOUT = "rollout.json"  # of `tandem rollout`: the number of batches, and their inputs' hashes
MOST_WORKERS = 4096


def write_status(folder: Path, step: int, steps: int, processes: Sequence[dict[str, Any]]) -> None:
    """Replace the status. processes: role, node, pid, state of each, and more."""
    status = {"time": now(), "step": step, "steps": steps, "processes": list(processes)}
    _replace(folder / STATUS, status)


def read_status(folder: Path) -> dict[str, Any] | None:
    """Read the status; None as long as the run is starting. Raises UserError for a broken file."""
    path = folder / STATUS
    if not path.exists():
        return None
    names = ("time", "step", "steps", "processes")
    return read_file(
        path,
        lambda text: {name: json.loads(text)[name] for name in names},
        next="the run writes it anew at its next step",
    )


def forget_status(folder: Path) -> None:
    """Drop the status and the request of the run before, as a new one begins in its folder."""
    for name in (STATUS, REQUEST):
        (folder / name).unlink(missing_ok=True)


def request_workers(folder: Path, workers: int) -> None:
    """Ask the run for so many rollout workers."""
    _replace(folder / REQUEST, {"rollout": workers})


def take_requested_workers(folder: Path) -> int:
    """Return for how many workers the run was asked, and forget it; 0: it was not."""
    wanted = requested_workers(folder)
    (folder / REQUEST).unlink(missing_ok=True)
    return wanted


def requested_workers(folder: Path) -> int:
    """Return for how many workers the run was asked; 0: it was not."""
    try:
        return int(json.loads((folder / REQUEST).read_text())["rollout"])
    except FileNotFoundError:  # or another step's rollouts took it at this moment
        return 0


def parse_worker_count(text: str) -> int:
    """Read "rollout=4". Raises UserError."""
    name, _, number = text.partition("=")
    is_count = re.fullmatch("[0-9]{1,4}", number)
    if name != "rollout" or not is_count or not 0 < int(number) <= MOST_WORKERS:
        raise UserError(
            "not a number of workers",
            where="tandem scale",
            found=text,
            expected=f"rollout=N, N from 1 to {MOST_WORKERS}",
            next="tandem scale RUN rollout=4",
        )
    return int(number)


def _replace(path: Path, value: dict[str, Any]) -> None:
    with disk_errors(path):  # not durable: after a power cut nobody runs
        temporary = path.with_name(f".tmp-{path.name}")
        temporary.write_text(json.dumps(value, indent=1) + "\n")
        temporary.replace(path)
