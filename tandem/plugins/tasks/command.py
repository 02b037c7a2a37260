"""`tandem generate`: a generated task as a JSONL file of problems, without torch.

It does not know the contents of the rows.
"""

from pathlib import Path

from tandem.cli.progress import console
from tandem.plugins.tasks.generate import Row
from tandem.registry import find, names
from tandem.runtime.disk import disk_errors, write_rows
from tandem.runtime.errors import UserError
from tandem.runtime.wording import counted

REASONING, VERIFIERS = "reasoning_gym:", "verifiers:"


def generate(
    task: str,
    out: Path,
    *,
    count: int,
    difficulty: int | None,
    seed: int,
    split: str,
    weights: str,
    force: bool,
) -> None:
    """Write count problems of a task to out. task: one of the registry's, reasoning_gym:NAME,NAME
    with weights for them, or verifiers:ID."""
    if out.suffix != ".jsonl":
        raise UserError(
            "the problems are written as JSONL",
            where="--out",
            found=str(out),
            expected="FILE.jsonl",
        )
    if out.exists() and not force:
        raise UserError(
            "the file exists",
            where=str(out),
            expected="a new file",
            next="add --force to replace it",
        )
    rows = _rows(task, count, difficulty, seed, split, _numbers(weights))
    if not rows:
        raise UserError(
            "the task has no problem of this split",
            where=task,
            found=f"split {split}",
            expected="one at least",
            next="another --difficulty, or the other --split",
        )
    with disk_errors(out):
        write_rows(out, rows)
    console.print(
        f"{counted(len(rows), 'problems')} of {task}, split {split}, seed {seed} -> {out}",
        markup=False,
    )
    if len(rows) < count:
        console.print(f"{len(rows):,} of {count:,}: {_why_fewer(task)}", markup=False)


def _why_fewer(task: str) -> str:
    if task.startswith(VERIFIERS):
        return "the environment has no more tasks"
    if "," in task:
        return "one of the data sets has no more new questions, and each keeps its share"
    return "there are no more new ones at this difficulty; another --difficulty may have more"


def _rows(
    task: str, count: int, difficulty: int | None, seed: int, split: str, weights: list[float]
) -> list[Row]:
    if task.startswith(REASONING):
        from tandem.plugins.tasks import reasoning_gym

        chosen = [name for name in task.removeprefix(REASONING).split(",") if name]
        return reasoning_gym.rows(chosen, weights, split, count, seed, difficulty)
    if weights:
        raise UserError(
            "weights mix the data sets of reasoning-gym",
            where="--weights",
            found=f"weights for {task}",
            expected="none",
            next="name several files in data.train, with data.weights",
        )
    if task.startswith(VERIFIERS):
        _refuse_draws(task, split, seed, difficulty)
        rows = find("sources", "verifiers", key="TASK")
        return list(rows(task.removeprefix(VERIFIERS), limit=count))
    if task in names("tasks"):
        drawn = find("tasks", task, key="TASK")
        lowest = drawn.difficulties[0]
        return drawn.rows(split, count, seed, lowest if difficulty is None else difficulty)  # type: ignore[no-any-return]
    raise UserError(
        "there is no such task",
        found=task,
        expected=f"{', '.join(names('tasks'))}, {REASONING}NAME,... or {VERIFIERS}ID",
    )


def _refuse_draws(task: str, split: str, seed: int, difficulty: int | None) -> None:
    """Raise UserError for options that choose among drawn problems: this task copies a fixed
    list."""
    options = {"--split": (split, "train"), "--difficulty": (difficulty, None), "--seed": (seed, 0)}
    given = " ".join(
        f"{option} {value}" for option, (value, default) in options.items() if value != default
    )
    if given:
        raise UserError(
            "the tasks of a verifiers environment are its own: they are not drawn",
            where=task,
            found=given,
            expected="--count only, for the first ones",
            next=f"leave out {given}",
        )


def _numbers(weights: str) -> list[float]:
    try:
        return [float(part) for part in weights.split(",")] if weights else []
    except ValueError:
        raise UserError(
            "the weights are no numbers", where="--weights", found=weights, expected="e.g. 2,1"
        ) from None
