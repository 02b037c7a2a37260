"""`tandem init`: a project of one's own, which runs as it is.

    tandem init my-task                        a tiny model is made, and chats that warm it up
    tandem init my-task --model Qwen/Qwen3-0.6B

The task is that of the demo, eight templates of school algebra: problems, a reward and a recipe,
each meant to be replaced. It knows no run.
"""

from pathlib import Path
from typing import Annotated, Any

from tandem.cli.arguments import argument, unset
from tandem.cli.progress import print_lines
from tandem.config.recipe import toml_value
from tandem.plugins.start.tiny import make_algebra_model
from tandem.registry import find
from tandem.runtime.disk import whole_folder, write_rows
from tandem.runtime.errors import UserError

RECIPE = """\
# Every key: tandem plan --keys. Paths are from the folder that the command is typed in.
[model]
path = {model}

[data]
train = "train.jsonl"               # {{"prompt": ..., "answer": ...}} a line

[reward]
function = "reward.py:score"

[rollout]
max_new_tokens = {tokens}

[rl]
algorithm = "dr_grpo"
prompts_per_step = 64
group_size = 8

[train]
learning_rate = {rate}

[eval]
data = "test.jsonl"
every = 10

[run]
steps = 40
"""

WARM_UP = """
[sft]
train = "chats.jsonl"               # {"messages": [...]} a line
steps = 400
batch_size = 32
learning_rate = 6e-3
warmup_steps = 20

[preference]                        # for tandem dpo
learning_rate = 1e-4
"""

REWARD = '''\
"""The reward of this project. Try it alone:

    tandem try reward.py:score --data train.jsonl --rows 1 --answer "Answer: {answer}"
"""


def score(problem, completion: str) -> float:
    """Give 1 if the last word is the answer, else 0."""
    return float(completion.split()[-1:] == [problem.answer])
'''

README = """\
# {name}

`train.jsonl` and `test.jsonl` hold problems, `reward.py` scores an answer, `recipe.toml` is the
run. Put your own in their places. `tandem plan --keys` lists every key.
{warm}
    tandem plan recipe.toml{model}     # does it fit this machine?
    tandem train recipe.toml{model}    # the same command resumes
    tandem view                      # curves, episodes and tokens of it, in a browser, live
    tandem show runs/recipe-train --worst    # episodes to read
"""

WARM = """
The model in `model/` is random. `chats.jsonl` teaches it to answer, half of the time
carelessly (some of its rows repeat, which is right):

    tandem sft recipe.toml

Problems of your own need chats of your own. The last lines of `tandem sft` name the warm model:
"""


def init(
    folder: Annotated[Path, argument(help="the project: a new folder")],
    model: Annotated[
        str, unset(help="Hugging Face directory or hub name to train; default: a tiny random model")
    ] = "",
) -> None:
    """Write a project that runs as it is. Recipe, data, a reward of your own, a README."""
    if model and Path(model).is_dir():
        model = str(Path(model).resolve())
    elif model:
        print_lines([f"{model} is no folder here: it is taken as a name of the hub"])
    if folder.exists():
        next = "name another folder"
        raise UserError("there is something at the project's place", where=str(folder), next=next)
    with whole_folder(folder) as unfinished:
        _write(unfinished, folder.name, model)
    first = "tandem train recipe.toml" if model else "tandem sft recipe.toml"
    print_lines([f"a project of {len(list(folder.iterdir()))} files -> {folder}", ""])
    print_lines([f"next: cd {folder} && {first}    (README.md has the rest)"])
    print_lines(["and in another terminal, to look at it: tandem view"])


def _write(folder: Path, name: str, model: str) -> None:
    algebra = find("tasks", "algebra", key="tandem init")
    problems = _problems(algebra.rows("train", 400, 0, 1))
    write_rows(folder / "train.jsonl", problems)
    write_rows(folder / "test.jsonl", _problems(algebra.rows("test", 64, 0, 1)))
    recipe = RECIPE.format(
        model=toml_value(model or "model"),
        tokens=128 if model else 32,
        rate="1e-6" if model else "6e-4",
    )
    override = "" if model else " model.path=runs/recipe-sft/hf/step_000400"
    (folder / "recipe.toml").write_text(recipe + WARM_UP * (not model))
    (folder / "reward.py").write_text(REWARD.format(answer=problems[0]["answer"]))
    readme = README.format(name=name, warm=WARM * (not model), model=override)
    (folder / "README.md").write_text(readme)
    if not model:
        write_rows(folder / "chats.jsonl", algebra.warm_start(16000, 0, 1, careless=0.5))
        make_algebra_model(folder / "chats.jsonl", folder / "model", seed=0)


def _problems(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return problems as {"prompt": text, "answer": text}."""
    return [
        {"prompt": row["prompt"][0]["content"], "answer": row["reward_model"]["ground_truth"]}
        for row in rows
    ]
