"""Status of a run, a file of its folder: the driver writes it, `tandem status RUN` reads it.

It is replaced as a whole. A resume does not need it, so it is dropped when a run starts again.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.run_folder.files import read_file
from tandem.run_folder.lock import now
from tandem.runtime.disk import disk_errors

STATUS = "status.json"
ROLLOUT = "rollout.json"  # of `tandem rollout`: the number of batches, and their inputs' hashes


def write_status(folder: Path, step: int, steps: int, processes: Sequence[dict[str, Any]]) -> None:
    """Replace the status. processes: role, node, pid, state of each, and more."""
    status = {"time": now(), "step": step, "steps": steps, "processes": list(processes)}
    path = folder / STATUS
    with disk_errors(path):  # not durable: after a power cut nobody runs
        temporary = path.with_name(f".tmp-{path.name}")
        temporary.write_text(json.dumps(status, indent=1) + "\n")
        temporary.replace(path)


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
