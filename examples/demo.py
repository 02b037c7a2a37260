"""The whole loop on a laptop: data, a tiny model, supervised warm start, GRPO, evaluation, export.

    make demo        or: python examples/demo.py [--seed 1] [--folder runs/demo-1] [--fresh]

Each stage prints the command that does the same by hand. Killed anywhere, the same command goes on
where it was.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from tandem.cli.progress import console
from tandem.config.recipe import load_config
from tandem.runtime.disk import disk_errors
from tandem.runtime.errors import UserError

BY_HAND = ".venv/bin/tandem"
RECIPE = Path(__file__).parent.parent / "recipes" / "demo.toml"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--fresh", action="store_true", help="start over; earlier runs are kept beside the new ones"
    )
    parser.add_argument("overrides", nargs="*", help="settings of both runs: model.dtype=bfloat16")
    args = parser.parse_args()
    try:
        demo(args.folder, args.seed, args.fresh, args.overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def demo(folder: Path, seed: int, fresh: bool, changes: list[str]) -> None:
    started = time.perf_counter()
    make_inputs(folder, seed)
    from tandem.cli import train  # imports torch, after the first line has been shown

    overrides = [*recipe(folder, seed, "sft", model=folder / "model"), *changes]
    say(f"warm start: {BY_HAND} sft recipes/demo.toml {' '.join(overrides)}")
    warm_model = train.train("sft", load_config(RECIPE, overrides), folder / "sft", fresh)
    overrides = [*recipe(folder, seed, "train", model=warm_model), *changes]
    say(f"GRPO: {BY_HAND} train recipes/demo.toml {' '.join(overrides)}")
    final = train.train("train", load_config(RECIPE, overrides), folder / "train", fresh)
    report(folder, final)
    console.print(f"\n{time.perf_counter() - started:.0f} seconds in all. Next:")
    console.print(f"  .venv/bin/tensorboard --logdir {folder}    curves")
    console.print(
        f"  {BY_HAND} eval recipes/demo.toml model.path={final} eval.data={folder}/data/test.jsonl"
    )
    console.print(f"  {BY_HAND} plan --keys    everything a recipe can say")
    console.print("  README.md, 'Your own model, data and reward'")


def recipe(folder: Path, seed: int, command: str, model: Path) -> list[str]:
    """Return the settings that differ from recipes/demo.toml."""
    data = folder / "data"
    return [
        f"run.seed={seed}",
        f"run.folder={folder / command}",
        f"model.path={model}",
        f"data.train={data / 'train.jsonl'}",
        f"sft.train={data / 'warm.jsonl'}",
        f"eval.data={data / 'test.jsonl'}",
    ]


def make_inputs(folder: Path, seed: int) -> None:
    from tandem.tasks import algebra
    from tandem.tasks.registry import write_rows

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
        mark.write_text(str(seed))
    if not (folder / "data" / "warm.jsonl").exists():
        say(f"data: eight templates of school algebra -> {folder}/data")
        data = folder / "data"
        write_rows(data / "train.jsonl", algebra.rows("train", 400, seed, difficulty=1))
        write_rows(data / "test.jsonl", algebra.rows("test", 64, seed, difficulty=1))
        write_rows(data / "warm.jsonl", algebra.warm_start(16000, seed, difficulty=1, careless=0.5))
    if not (folder / "model" / "tokenizer.json").exists():
        say(f"model: a random character-level Qwen3 of 0.9M parameters -> {folder}/model")
        from tandem.model.tiny import make_tiny

        shutil.rmtree(folder / "model", ignore_errors=True)
        make_tiny(folder / "model", seed=seed)


def report(folder: Path, final: Path) -> None:
    """Held-out reward by template, before and after GRPO, and one answer of the exported model in
    stock transformers."""
    from rich.table import Table

    from tandem.run_folder.metrics import read_metrics

    rows = [row for row in read_metrics(folder / "train") if "eval/sampled" in row]
    table = Table("held-out reward, sampled", "before", "after", title="64 problems x 4 samples")
    for name in [
        key
        for key in rows[0]
        if key.startswith("eval/sampled") and not key.endswith(("interval", "truncated"))
    ]:
        table.add_row(
            name.removeprefix("eval/sampled").strip("/") or "all",
            f"{rows[0][name]:.3f}",
            f"{rows[-1][name]:.3f}",
        )
    console.print(table)
    console.print(curve(folder))
    say("the exported model, in stock transformers:")
    for line in (folder / "data" / "test.jsonl").read_text().splitlines()[:3]:
        row = json.loads(line)
        said = ask_stock_transformers(final, row["prompt"][0]["content"])
        console.print(f"{said}    (answer: {row['reward_model']['ground_truth']})", markup=False)


def curve(folder: Path, width: int = 60) -> str:
    """The training reward as one line of blocks."""
    from tandem.run_folder.metrics import read_metrics

    rewards = [row["reward"] for row in read_metrics(folder / "train") if "reward" in row]
    size = -(-len(rewards) // width)
    means = [
        sum(part) / len(part)
        for part in (rewards[i : i + size] for i in range(0, len(rewards), size))
    ]
    return (
        "training reward "
        + "".join("▁▂▃▄▅▆▇█"[min(7, max(0, int(8 * mean)))] for mean in means)
        + f" {means[-1]:.2f}"
    )


def ask_stock_transformers(model_folder: Path, question: str) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=40, do_sample=False)[
        0, prompt["input_ids"].shape[1] :
    ]
    return f"  {question} -> {tokenizer.decode(tokens, skip_special_tokens=True)!r}"


def say(text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")


if __name__ == "__main__":
    sys.exit(main())
