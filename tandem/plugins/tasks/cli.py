"""`tandem generate`: a generated task as a JSONL file of problems, without torch.

It does not know the contents of the rows.
"""

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from tandem.cli.arguments import argument, unset
from tandem.registry import find, names
from tandem.runtime.errors import UserError
from tandem.runtime.wording import counted

REASONING = "reasoning_gym:"


def generate(
    task: Annotated[
        str, argument(help="a task, e.g. guess, reasoning_gym:NAME, verifiers:ID, harbor:FOLDER")
    ],
    out: Annotated[Path, unset(help="FILE.jsonl")],
    count: Annotated[int, Option(min=1, help="how many problems")] = 1000,
    difficulty: Annotated[int | None, unset(help="from 1 on; default: the task's own")] = None,
    seed: Annotated[int, Option(min=0, help="the same seed gives the same problems")] = 0,
    split: Annotated[str, Option(help="train or test, which never share a problem")] = "train",
    weights: Annotated[str, unset(help="of several reasoning_gym data sets, e.g. 2,1")] = "",
    force: Annotated[bool, Option("--force", help="replace the file")] = False,
) -> None:
    """Generate the problems of a built-in task, or of reasoning-gym."""
    from tandem.cli.progress import console
    from tandem.runtime.disk import disk_errors, write_rows

    if out.suffix != ".jsonl":
        raise UserError("the problems are written as JSONL", where="--out", found=str(out))
    if out.exists() and not force:
        raise UserError("the file exists", where=str(out), next="add --force to replace it")
    try:
        shares = [float(part) for part in weights.split(",")] if weights else []
    except ValueError:
        raise UserError(
            "the weights are no numbers", where="--weights", found=weights, expected="e.g. 2,1"
        ) from None
    rows = _rows(task, count, difficulty, seed, split, shares)
    if not rows:
        raise UserError(
            "the task has no problem of this split",
            where=task,
            found=f"split {split}",
            next="another --difficulty, or the other --split",
        )
    with disk_errors(out):
        write_rows(out, rows)
    made = f"{counted(len(rows), 'problems')} of {task}, split {split}, seed {seed} -> {out}"
    console.print(made, markup=False)
    if len(rows) < count:
        why = "there are no more new ones at this difficulty; another --difficulty may have more"
        if task.partition(":")[0] in names("sources"):
            why = "the environment has no more tasks"
        elif "," in task:
            why = "one of the data sets has no more new questions, and each keeps its share"
        console.print(f"{len(rows):,} of {count:,}: {why}", markup=False)


def _rows(
    task: str, count: int, difficulty: int | None, seed: int, split: str, weights: list[float]
) -> list[dict[str, Any]]:
    if task.startswith(REASONING):
        from tandem.plugins.tasks import reasoning_gym

        chosen = [name for name in task.removeprefix(REASONING).split(",") if name]
        return reasoning_gym.rows(chosen, weights, split, count, seed, difficulty)
    if weights:
        what = "weights mix the data sets of reasoning-gym; of files, data.weights mixes them"
        raise UserError(what, where="--weights", found=task)
    source, _, id = task.partition(":")
    if id and source in names("sources"):  # which copies a fixed list, and draws nothing
        options: list[tuple[str, object, object]] = [("--split", split, "train")]
        options += [("--difficulty", difficulty, None), ("--seed", seed, 0)]
        given = [f"{option} {value}" for option, value, default in options if value != default]
        if given:
            what = f"the tasks of {source} are its own: they are not drawn"
            raise UserError(what, where=task, found=" ".join(given))
        return list(find("sources", source, key="TASK")(id, limit=count))
    if task in names("tasks"):
        drawn = find("tasks", task, key="TASK")
        lowest = drawn.difficulties[0]
        return drawn.rows(split, count, seed, lowest if difficulty is None else difficulty)  # type: ignore[no-any-return]
    others = ":ID or ".join(names("sources"))
    raise UserError(
        "there is no such task",
        found=task,
        expected=f"{', '.join(names('tasks'))}, {REASONING}NAME,... or {others}:ID",
    )
