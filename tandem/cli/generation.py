"""`tandem rollout` and `tandem eval`: the engine without the trainer."""

import json
from pathlib import Path

from rich.table import Table

from tandem.build import build_engine, evaluator, prepare_process, read_data
from tandem.cli.progress import console
from tandem.config import Config
from tandem.data.render import load_renderer
from tandem.envs.rollout import run_episodes
from tandem.envs.single_turn import SingleTurn
from tandem.errors import UserError
from tandem.evaluate import sampling_params
from tandem.loop import score
from tandem.model.load import check_model, load_model
from tandem.rewards.pool import RewardPool
from tandem.stream.journal import write_episodes


def rollout(config: Config, out: Path) -> None:
    """Every training problem once, in order, `rl.prompts_per_step` at a time; one Parquet file for each."""
    if any(out.glob("rollout_step_*.parquet")):
        raise UserError(
            "the folder already holds episodes",
            where=str(out),
            expected="an empty folder or none",
            next="choose another --out",
        )
    prepare_process(config)
    problems = read_data(config, "data.train")["data.train"]
    check_model(config.model.path)
    renderer = load_renderer(config.model.path)
    problems = renderer.check_lengths(problems, config.data)
    engine = build_engine(config, load_model(config.model.path), renderer)
    size, total, count = config.rl.prompts_per_step, 0.0, 0
    with RewardPool(config.reward.function, config.reward.timeout_s, config.reward.workers) as reward:
        for number, start in enumerate(range(0, len(problems), size)):
            part = problems[start : start + size]
            attempts = run_episodes(
                part, group_size=config.rl.group_size, place=(config.run.seed, "rollout only", number), engine=engine,
                renderer=renderer, env=SingleTurn(), params=sampling_params(config.rollout, renderer.stop_token_ids),
            )  # fmt: skip
            groups = score(part, attempts, reward, config.reward.overlong_penalty)
            path = write_episodes(out, number, groups, kind="rollout")
            rewards = [e.reward for g in groups for e in g.episodes]
            total, count = total + sum(rewards), count + len(rewards)
            console.print(f"{path}: {len(rewards)} episodes, mean reward {sum(rewards) / len(rewards):.3f}")
    console.print(f"{count} episodes, mean reward {total / count:.3f}")


def evaluate(config: Config, out: Path | None) -> dict[str, float]:
    if out is not None and not out.parent.is_dir():
        raise UserError(
            "the folder of the result does not exist",
            where=str(out.parent),
            expected="a folder",
            next=f"mkdir -p {out.parent}",
        )
    prepare_process(config)
    problems = read_data(config, "eval.data")["eval.data"]
    if not problems:
        raise UserError(
            "no held-out problems are named",
            where="eval.data",
            expected="a JSONL or Parquet file",
            next="add eval.data=FILE",
        )
    check_model(config.model.path)
    renderer = load_renderer(config.model.path)
    problems = renderer.check_lengths(problems, config.data, key="eval.data")
    engine = build_engine(config, load_model(config.model.path), renderer)
    with RewardPool(config.reward.function, config.reward.timeout_s, config.reward.workers) as reward:
        metrics = evaluator(config, problems, engine, renderer, reward, None)(0)
    table = Table("metric", "value", title=f"{config.model.path} on {len(problems)} problems")
    for name, value in metrics.items():
        table.add_row(name.removeprefix("eval/"), f"{value:.3f}")
    console.print(table)
    if out is not None:
        out.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    return metrics
