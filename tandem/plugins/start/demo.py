"""`tandem demo`: the whole loop on a laptop: data, a tiny model, supervised warm start, GRPO,
evaluation, export.

Each stage prints the command that does the same by hand. After a kill at any moment
the same command resumes.
"""

import json
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

from rich.markup import escape
from typer import Option

from tandem.cli.arguments import Fresh, Overrides
from tandem.cli.progress import console
from tandem.config.recipe import load_config
from tandem.plugins.start.tiny import make_algebra_model
from tandem.registry import find
from tandem.runtime.disk import disk_errors, whole_folder, write_atomic, write_rows
from tandem.runtime.errors import UserError

RECIPE = Path(__file__).with_name("demo.toml")


def demo(
    overrides: Overrides = None,
    folder: Annotated[Path, Option(help="where data, model and runs go")] = Path("runs/demo"),
    seed: Annotated[int, Option(min=0, help="another seed: other data, model and draws")] = 0,
    fresh: Fresh = False,
) -> None:
    """Show the whole loop in minutes. Data, a tiny model, SFT, GRPO, evaluation, export."""
    started, changes = time.perf_counter(), overrides or []
    make_inputs(folder, seed)
    from tandem.cli import train  # imports torch, after the first line has been shown

    recipe, by_hand = folder / "demo.toml", command_name()
    warm = [*settings(folder, seed, "sft", model=folder / "model"), *changes]
    say(f"warm start: {by_hand} sft {shlex.join([str(recipe), *warm])}")
    warm_model = train.train("sft", load_config(recipe, warm), folder / "sft", fresh)
    learned = [*settings(folder, seed, "train", model=warm_model), *changes]
    say(f"GRPO: {by_hand} train {shlex.join([str(recipe), *learned])}")
    final = train.train("train", load_config(recipe, learned), folder / "train", fresh)
    report(folder, final)
    console.print(f"\n{time.perf_counter() - started:.0f} seconds in all. Next:")
    test = [str(recipe), f"model.path={final}", f"eval.data={folder}/data/test.jsonl"]
    shown = f"  {by_hand} view {shlex.quote(str(folder))}    its curves, episodes and tokens"
    console.print(shown, markup=False)
    console.print(f"  {by_hand} eval {shlex.join(test)}", markup=False)
    console.print(f"  {by_hand} init my-task    a project of your own: recipe, data, reward")
    console.print(f"  {by_hand} plan --keys    everything a recipe can say")


def command_name() -> str:
    """Return how the user types `tandem`: by its path, if the shell would not find this one."""
    own = Path(sys.executable).with_name("tandem")
    found = shutil.which("tandem")
    if found is not None and Path(found).resolve() == own.resolve():
        return "tandem"
    return shlex.quote(os.path.relpath(own)) if own.exists() else f"{sys.executable} -m tandem"


def settings(folder: Path, seed: int, command: str, model: Path) -> list[str]:
    """Return the settings that differ from the recipe."""
    data = folder / "data"
    warm = [f"sft.train={data / 'warm.jsonl'}", "run.save_every=100"]  # its steps take 0.1 s
    return [
        f"run.seed={seed}",
        f"run.folder={folder / command}",
        f"model.path={model}",
        f"data.train={data / 'train.jsonl'}",
        f"eval.data={data / 'test.jsonl'}",
        *warm * (command == "sft"),
    ]


def make_inputs(folder: Path, seed: int) -> None:
    """Write recipe, data and model, where they are not there yet."""
    mark = folder / "seed"
    if mark.exists() and mark.read_text() != str(seed):
        raise UserError(
            "the folder holds data and model of another seed",
            where=str(mark),
            found=f"seed {mark.read_text()}",
            expected=f"seed {seed}",
            next=f"add --folder {folder}-{seed}",
        )
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(mark, str(seed).encode())
    if not (folder / "demo.toml").exists():
        write_atomic(folder / "demo.toml", RECIPE.read_bytes())
    if not (folder / "data" / "warm.jsonl").exists():
        say(f"data: eight templates of school algebra -> {folder}/data")
        algebra, data = find("tasks", "algebra", key="tandem demo"), folder / "data"
        write_rows(data / "train.jsonl", algebra.rows("train", 400, seed, 1))
        write_rows(data / "test.jsonl", algebra.rows("test", 64, seed, 1))
        write_rows(data / "warm.jsonl", algebra.warm_start(16000, seed, difficulty=1, careless=0.5))
    if not (folder / "model").exists():
        say(f"model: a random Qwen3 of 0.4M parameters -> {folder}/model")
        with whole_folder(folder / "model") as unfinished:
            make_algebra_model(folder / "data" / "warm.jsonl", unfinished, seed)


def report(folder: Path, final: Path) -> None:
    """Print the held-out reward by template, before and after GRPO, and three answers of the
    exported model in stock transformers."""
    from rich.table import Table
    from transformers import pipeline

    from tandem.run_folder.metrics import read_metrics

    rows = [row for row in read_metrics(folder / "train") if "eval/sampled" in row]
    table = Table("held-out reward, sampled", "before", "after")
    for name in rows[0] if rows else ():  # a changed eval.data may be empty
        if not name.startswith("eval/sampled") or name.endswith(("interval", "truncated")):
            continue
        table.add_row(
            name.removeprefix("eval/sampled").strip("/") or "all",
            f"{rows[0][name]:.3f}",
            f"{rows[-1][name]:.3f}",
        )
    console.print(table)
    console.print(curve(folder))
    say("the exported model, in stock transformers:")
    stock = pipeline("text-generation", model=str(final), dtype="float32", device="cpu")
    for line in (folder / "data" / "test.jsonl").read_text().splitlines()[:3]:
        row = json.loads(line)
        chat = stock(row["prompt"], max_new_tokens=40, do_sample=False)[0]["generated_text"]
        shown = f"  {chat[-2]['content']} -> {chat[-1]['content']!r}"
        answer = row["reward_model"]["ground_truth"]
        console.print(f"{shown}    (answer: {answer})", markup=False)


def curve(folder: Path, width: int = 40) -> str:
    """Draw the training reward as one line of blocks."""
    from tandem.run_folder.metrics import read_metrics

    rewards = [row["reward"] for row in read_metrics(folder / "train") if "reward" in row]
    size = -(-len(rewards) // width)
    means = [
        sum(part) / len(part)
        for part in (rewards[i : i + size] for i in range(0, len(rewards), size))
    ]
    blocks = "".join("▁▂▃▄▅▆▇█"[min(7, max(0, int(8 * mean)))] for mean in means)
    return f"training reward  {blocks}  {rewards[0]:.2f} -> {rewards[-1]:.2f}"


def say(text: str) -> None:
    """Print a heading."""
    console.print(f"\n[bold]{escape(text)}[/bold]")
