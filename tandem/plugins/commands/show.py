"""`tandem show`: a step's episodes as a page to read. `tandem status`: a run while it goes on."""

from pathlib import Path

from tandem.cli.progress import console, print_lines, print_table
from tandem.run_folder.files import require_run
from tandem.run_folder.lock import holder
from tandem.run_folder.read import PastRun, open_past, read_notes
from tandem.run_folder.samples import page, read_samples, sample_file
from tandem.run_folder.status import ROLLOUT, read_status
from tandem.runtime.errors import UserError
from tandem.runtime.wording import counted

COLUMNS = ("role", "node", "pid", "state", "version", "requests", "restarts")  # of `tandem status`


def show(
    folder: Path, step: int | None, *, best: bool, worst: bool, count: int, held_out: bool
) -> None:
    """Print count episodes of a step, by default the newest one: of different problems, or the best
    or worst first."""
    if best and worst:
        raise UserError(
            "only one order can come first", found="--best and --worst", expected="one of them"
        )
    past = open_past(folder)
    path = _file(past, step, held_out)
    samples = read_samples(path)
    if best or worst:
        samples.sort(key=lambda sample: sample.episode.reward, reverse=best)
    mean = sum(sample.episode.reward for sample in samples) / len(samples)
    order = ", best first" if best else ", worst first" if worst else ""
    number = f"{min(count, len(samples))} of them{order}"
    print_lines([f"{path}: {counted(len(samples), 'episodes')}, mean reward {mean:.3f}; {number}"])
    for sample in samples[:count]:
        console.rule(style="dim")
        console.print(page(sample), markup=False)


def _file(past: PastRun, step: int | None, held_out: bool) -> Path:
    kind = "eval_sampled" if held_out else "train"
    steps = past.journaled(kind) or past.journaled("train") or past.journaled("eval_sampled")
    wanted = max(steps, default=0) if step is None else step
    path = sample_file(past.episodes, wanted, held_out=held_out)
    if path is None or (held_out and not path.name.startswith(kind)):
        there = past.journaled(kind)
        raise UserError(
            "the run has no such episodes",
            where=str(past.episodes),
            found=f"none of step {wanted}",
            expected=f"steps {there[0]} to {there[-1]}" if there else "a run that has sampled some",
            next="ls that folder, and name a step with --step",
        )
    return path


def status(folder: Path) -> None:
    """Print whether a run lives, how far it is, and who runs where and does what."""
    require_run(folder)
    alive, written = holder(folder), read_status(folder)
    is_over = False
    if written and written["step"] == written["steps"]:  # and exported; a rollout has no model
        model = folder / "hf" / f"step_{written['steps']:06d}"
        is_over = (folder / ROLLOUT).exists() or model.exists()
    stands = "has finished" if is_over else "does not run; the same command resumes it"
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
