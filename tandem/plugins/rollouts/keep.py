"""`tandem rollout --keep LOW:HIGH`: the problems that are neither solved nor hopeless, as a data
file to train on.

    tandem rollout my.toml --out runs/rollout --keep 0.2:0.8      writes runs/rollout.kept.jsonl

A problem's mean reward decides, over its episodes whose environment did not fail; rows keep all
they had and gain `mean_reward`.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandem.config.episodes import Data
from tandem.run_folder.episode_files import read_columns
from tandem.runtime.disk import write_atomic
from tandem.runtime.errors import UserError
from tandem.types import Problem

KEPT = ".kept.jsonl"


def parse_range(text: str) -> tuple[float, float]:
    """Read "0.2:0.8" as (0.2, 0.8). Raises UserError."""
    low, sign, high = text.partition(":")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = (1.0, 0.0)
    if not sign or not bounds[0] <= bounds[1]:
        raise UserError(
            "the range of mean rewards cannot be read",
            where="--keep",
            found=repr(text),
            expected="LOW:HIGH with LOW <= HIGH, e.g. 0.2:0.8",
        )
    return bounds


def mean_rewards(files: Iterable[Path]) -> dict[str, float]:
    """Compute the mean reward by uid, over the episodes whose environment did not fail."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for file in files:
        for row in read_columns(file, ["uid", "reward", "env_error"]):
            if not row["env_error"]:
                rewards[row["uid"]].append(row["reward"])
    return {uid: float(np.mean(values)) for uid, values in rewards.items()}


def keep(
    problems: Sequence[Problem],
    rates: Mapping[str, float],
    bounds: tuple[float, float],
    path: Path,
    columns: Data,
) -> str:
    """Write the problems whose mean reward lies within the bounds, both included; return a line for
    the user. Raises UserError if there is none."""
    low, high = bounds
    kept = [problem for problem in problems if low <= rates[problem.uid] <= high]
    if not kept:
        spread = np.quantile(list(rates.values()), [0.0, 0.25, 0.5, 0.75, 1.0])
        raise UserError(
            "no problem has a mean reward in that range",
            where=f"--keep {low:g}:{high:g}",
            found="mean rewards with quartiles " + ", ".join(f"{rate:.2f}" for rate in spread),
            expected="a range that some of them lie in",
            next="choose other bounds",
        )
    lines = [
        json.dumps(as_row(p, columns) | {"mean_reward": rates[p.uid]}, ensure_ascii=False)
        for p in kept
    ]
    write_atomic(path, "".join(f"{line}\n" for line in lines).encode())
    easy = sum(rate > high for rate in rates.values())
    hard = sum(rate < low for rate in rates.values())
    return (
        f"kept {len(kept):,} of {len(problems):,} problems in {path} "
        f"({easy:,} too easy, {hard:,} too hard)"
    )


def as_row(problem: Problem, columns: Data) -> dict[str, Any]:
    """Make a row that reads back as the same problem under the same column names."""
    prompt = list(problem.messages) if problem.conversational else problem.messages[-1]["content"]
    category = {columns.category_column: problem.category} if problem.category else {}
    named = {columns.prompt_column: prompt, columns.answer_column: problem.answer}
    return {**problem.metadata, "uid": problem.uid, **named, **category}
