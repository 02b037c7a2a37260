"""`tandem status` and `tandem scale`: a run looked at, and grown or shrunk, while it goes on."""

from pathlib import Path

from tandem.cli.progress import print_lines, print_table
from tandem.run_folder.files import require_run
from tandem.run_folder.lock import holder
from tandem.run_folder.read import read_notes
from tandem.run_folder.status import (
    ROLLOUT,
    parse_worker_count,
    read_status,
    request_workers,
    requested_workers,
)
from tandem.runtime.errors import UserError

COLUMNS = ("role", "node", "pid", "state", "version", "requests", "restarts")


def status(folder: Path) -> None:
    """Print whether a run lives, how far it is, and who runs where and does what."""
    require_run(folder)
    alive, written = holder(folder), read_status(folder)
    is_over = False
    if written and written["step"] == written["steps"]:  # and exported; a rollout has no model
        model = folder / "hf" / f"step_{written['steps']:06d}"
        is_over = (folder / ROLLOUT).exists() or model.exists()
    stands = "has finished" if is_over else "does not run; the same command goes on"
    print_lines([f"{folder}: {f'runs: {alive}' if alive else stands}"])
    if not alive and (failed := read_notes(folder).failed):
        print_lines([f"its last start failed: {failed}"])
    if written is None:
        print_lines(["it is starting: no step yet" if alive else "no step since its last start"])
        return
    step, steps, when = written["step"], written["steps"], written["time"]
    print_lines([f"step {step} of {steps}, {'as of' if alive else 'last seen'} {when}"])
    if wanted := requested_workers(folder):
        print_lines([f"{wanted} rollout workers from the next rollout on (tandem scale)"])
    if alive:
        print_table(
            COLUMNS,
            [[str(process.get(name, "")) for name in COLUMNS] for process in written["processes"]],
        )


def scale(folder: Path, wanted: str) -> None:
    """Ask a run that lives for another number of rollout workers; it follows before its next
    rollout. Raises UserError."""
    require_run(folder)
    count, alive = parse_worker_count(wanted), holder(folder)
    written = read_status(folder)
    if not alive or written is None:
        raise UserError(
            "only a run that is under way has workers",
            where=str(folder),
            found="no process that runs it" if not alive else "a run that is just starting",
            expected="a run that has made a step since its last start",
            next="wait for its first step"
            if alive
            else f"start the same command with rollout.workers={count}",
        )
    workers = [row for row in written["processes"] if row["role"].startswith("rollout worker")]
    if not workers:
        raise UserError(
            "the run has no rollout workers",
            where=str(folder),
            found="rollout.workers = 0: the trainer's own process samples",
            expected="a run with rollout.workers of at least 1",
            next=f"stop it, and start the same command with rollout.workers={count}",
        )
    request_workers(folder, count)
    print_lines([f"{folder}: {len(workers)} rollout workers now, {count} from the next rollout on"])
