"""Turns and tools on a laptop: a tiny model learns to halve, or to use a calculator
instead of guessing.

    python examples/tool_tasks.py --task guess [--seed 1] [--folder runs/guess-1] [--fresh]

--task is guess or calculator.

Data, a random model, a warm start and reinforcement learning, by the recipe of the task. The warm
start are chats that scripted players had with the recipe's own environment. They have several
habits, of which one pays: the model learns them all, and training finds out which. Killed
anywhere, run the same command again to resume.
"""

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np

from tandem.cli.progress import console
from tandem.config.recipe import load_config
from tandem.config.schema import Config
from tandem.envs.load import load_env
from tandem.model.tool_calls import Call, write_calls
from tandem.plugins.start.demo import curve, say
from tandem.run_folder.episode_files import read_episodes
from tandem.runtime.disk import disk_errors, write_atomic
from tandem.runtime.errors import UserError
from tandem.runtime.rng import address
from tandem.types import Env, Message, Problem

ROOT = Path(__file__).parent.parent
NUM_TRAIN, NUM_TEST, NUM_WARM = 500, 64, 16000
MAX_TOKENS = {"guess": 256, "calculator": 320}  # the tiny model's positions

RolloutRunner = Generator[str, str, None]  # says something, is told something, ...
Habit = Callable[[Problem, np.random.Generator], RolloutRunner]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=sorted(HABITS), required=True)
    parser.add_argument("--folder", type=Path, default=None, help="default: runs/TASK")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--fresh", action="store_true", help="start over; earlier runs are kept beside the new ones"
    )
    args = parser.parse_args()
    try:
        run(args.task, args.folder or Path("runs") / args.task, args.seed, args.fresh)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command again to resume", file=sys.stderr)
        return 130
    return 0


def run(task: str, folder: Path, seed: int, fresh: bool) -> None:
    started = time.perf_counter()
    make_inputs(task, folder, seed)
    from tandem.cli import train  # imports torch, after the first line has been shown

    warm_model = train.train(
        "sft", config_of(task, folder, seed, "sft", folder / "model"), folder / "sft", fresh
    )
    train.train(
        "train", config_of(task, folder, seed, "train", warm_model), folder / "train", fresh
    )
    report(folder)
    console.print(f"\n{time.perf_counter() - started:.0f} seconds in all")


def config_of(task: str, folder: Path, seed: int, command: str, model: Path) -> Config:
    """The task's recipe with the folders of this run; says by which command the same is done by
    hand."""
    recipe, data = ROOT / "recipes" / f"{task}.toml", folder / "data"
    overrides = [
        f"run.seed={seed}",
        f"run.folder={folder / command}",
        f"model.path={model}",
        f"data.train={data / 'train.jsonl'}",
        f"eval.data={data / 'test.jsonl'}",
        *[f"sft.train={data / 'warm.jsonl'}"] * (command == "sft"),
    ]
    say(f".venv/bin/tandem {command} recipes/{task}.toml {' '.join(overrides)}")
    return load_config(recipe, overrides)


# ---------------------------------------------------------------- data and model


def make_inputs(task: str, folder: Path, seed: int) -> None:
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
        (folder / "data").mkdir(parents=True, exist_ok=True)
        mark.write_text(str(seed))
    if not (folder / "data" / "warm.jsonl").exists():
        say(
            f"data: problems, and chats of players with {len(HABITS[task])} habits -> {folder}/data"
        )
        write_data(task, folder / "data", seed)
    if not (folder / "model" / "tokenizer.json").exists():
        say(f"model: a random character-level Qwen3 of 0.9M parameters -> {folder}/model")
        from tandem.model.tiny import make_tiny

        shutil.rmtree(folder / "model", ignore_errors=True)
        make_tiny(folder / "model", seed=seed, max_tokens=MAX_TOKENS[task])


def write_data(task: str, folder: Path, seed: int) -> None:
    from tandem.data.problems import read_problems
    from tandem.plugins.tasks import calculator, guess

    rows = {"guess": guess.TASK.rows, "calculator": calculator.TASK.rows}[task]
    for split, count in (("train", NUM_TRAIN), ("test", NUM_TEST)):
        write_rows(folder / f"{split}.jsonl", rows(split, count, seed, DIFFICULTY[task]))
    config = load_config(ROOT / "recipes" / f"{task}.toml", [])
    problems = read_problems(str(folder / "train.jsonl"), config.data, key="data.train")
    write_rows(folder / "warm.jsonl", asyncio.run(warm_start(task, config, problems, seed)))


def write_rows(path: Path, rows: list[dict]) -> None:
    with disk_errors(path):
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


async def warm_start(task: str, config: Config, problems: list[Problem], seed: int) -> list[dict]:
    """Chats of players whose habits are drawn by their shares."""
    make, (habits, shares) = load_env(config.env, config.sandbox), zip(*HABITS[task], strict=True)
    chats = []
    for n in range(NUM_WARM):
        draw = np.random.Generator(np.random.Philox(key=address(seed, task, "warm", n)))
        problem, habit = (
            problems[draw.integers(len(problems))],
            habits[draw.choice(len(habits), p=shares)],
        )
        chats.append(
            {"messages": await chat(make(), problem, habit(problem, draw), config.env.max_turns)}
        )
    return chats


async def chat(env: Env, problem: Problem, player: RolloutRunner, max_turns: int) -> list[Message]:
    messages, heard = list(await env.reset(problem)), None
    for _ in range(max_turns):
        text = next(player) if heard is None else player.send(heard)
        observation = await env.step(text)
        messages.append({"role": "assistant", "content": text})
        if observation.done:
            return messages
        heard = observation.messages[0]["content"]
        messages += observation.messages
    return messages[:-1]  # it has no turn left to react to the last message


# ---------------------------------------------------------------- habits


def halving(problem: Problem, draw: np.random.Generator) -> RolloutRunner:
    low, high = problem.metadata["low"], problem.metadata["high"]
    while True:
        guess = (low + high) // 2
        low, high = (guess + 1, high) if (yield str(guess)) == "higher" else (low, guess - 1)


def counting(problem: Problem, draw: np.random.Generator) -> RolloutRunner:
    """Tries one number after the other, whatever it is told."""
    for guess in range(problem.metadata["low"], problem.metadata["high"] + 1):
        yield str(guess)


def calling(problem: Problem, draw: np.random.Generator) -> RolloutRunner:
    result = yield write_calls([the_call(problem)])
    yield f"Answer: {result}"


def guessing(problem: Problem, draw: np.random.Generator) -> RolloutRunner:
    """Answers at once, with as many digits as a product may have."""
    digits = len(problem.answer.lstrip("-"))
    yield f"Answer: {draw.integers(10 ** (digits - 1), 10**digits)}"


def stumbling(problem: Problem, draw: np.random.Generator) -> RolloutRunner:
    """Calls with a slip of the pen, and then does not look it up again."""
    text = write_calls([the_call(problem)])
    yield text.replace("}}", "}") if draw.random() < 0.5 else text.removesuffix("\n</tool_call>")
    yield from guessing(problem, draw)


def the_call(problem: Problem) -> Call:
    return Call(name="calculator", arguments={"expression": problem.metadata["expression"]})


HABITS: dict[str, list[tuple[Habit, float]]] = {
    "guess": [(halving, 0.4), (counting, 0.6)],
    "calculator": [(calling, 0.4), (guessing, 0.4), (stumbling, 0.2)],
}
DIFFICULTY = {"guess": 2, "calculator": 1}


# ---------------------------------------------------------------- the end


def report(folder: Path) -> None:
    """Held-out reward and what the environment counted, before and after; kept in report.json."""
    from rich.table import Table

    journals = sorted((folder / "train" / "episodes").glob("eval_sampled_step_*.parquet"))
    before, after = held_out(journals[0]), held_out(journals[-1])
    table = Table("held out, sampled", "before", "after", title=f"{NUM_TEST} problems x 4 samples")
    for name in after:
        table.add_row(name, f"{before[name]:.3f}", f"{after[name]:.3f}")
    console.print(table)
    console.print(curve(folder))
    (folder / "report.json").write_text(
        json.dumps({"before": before, "after": after}, indent=1) + "\n"
    )


def held_out(journal: Path) -> dict[str, float]:
    """Means over the episodes of an evaluation: the reward, the turns, and what the environment
    gave."""
    episodes = [
        {"reward": one.reward, "turns": one.num_turns, **one.env_rewards}
        for one in read_episodes(journal)
    ]
    names = dict.fromkeys(name for episode in episodes for name in episode if name != "env")
    return {
        name: float(np.mean([episode.get(name, 0.0) for episode in episodes])) for name in names
    }


if __name__ == "__main__":
    sys.exit(main())
