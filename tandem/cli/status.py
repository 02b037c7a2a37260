"""`tandem status`: a run looked at while it goes on."""

from pathlib import Path

from tandem.cli.progress import print_lines, print_table
from tandem.run_folder.files import require_run
from tandem.run_folder.lock import holder
from tandem.run_folder.read import read_notes
from tandem.run_folder.status import ROLLOUT, read_status

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
    if alive:
        print_table(
            COLUMNS,
            [[str(process.get(name, "")) for name in COLUMNS] for process in written["processes"]],
        )
