"""Honest programs and cheats of graded.toml, one by one, as problems of the reward `code`."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tandem.types import Problem


@dataclass(frozen=True, kw_only=True)
class Graded:
    """A program, and the problem that it claims to solve."""

    name: str
    honest: bool
    program: str
    problem: Problem


def _graded():
    for task in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))[
        "task"
    ]:
        columns = {
            key: json.loads(held["json"]) if isinstance(held, dict) else held
            for key, held in task["columns"].items()
        }
        chat = ({"role": "user", "content": task.get("text", "Write the program.")},)
        for kind in ("honest", "cheats"):
            for name, program in task[kind].items():
                problem = Problem(
                    uid=f"{task['form']}/{name}", messages=chat, answer="", metadata=columns
                )
                yield Graded(
                    name=problem.uid, honest=kind == "honest", program=program, problem=problem
                )


GRADED = list(_graded())
