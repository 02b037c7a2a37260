"""The algebra data set: eight templates, two levels, a train and a test side that can never meet.

Gives rows in verl's schema and chats for a supervised warm start, and writes both as JSONL. Every
problem is addressed by (seed, level, split, template, number), so a longer data set begins with the
shorter one. Knows nothing of models, tokens or rewards; the mathematics is in algebra_templates.py.

    python -c "from tandem.tasks.algebra import write_dataset; \\
        write_dataset('data/algebra', level='school', num_train=192, num_test=64, num_warm=0, seed=0, careless=0.0)"
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tandem.runtime import rng
from tandem.runtime.errors import UserError
from tandem.tasks.algebra_templates import LEVELS, Draft

Row = dict[str, Any]

_ATTEMPTS = 2000  # a template whose 2,000th draw is not new has, for practical purposes, run out


def rows(split: str, count: int, seed: int, difficulty: int) -> list[Row]:
    """generate with the level as a number, as the other tasks have it: 1 is easy, 2 is school."""
    if not 1 <= difficulty <= len(LEVELS):
        expected = " or ".join(
            f"{number} ({level})" for number, level in enumerate(LEVELS, start=1)
        )
        raise UserError(
            "there is no such difficulty of algebra", found=str(difficulty), expected=expected
        )
    return generate(split, count, seed, list(LEVELS)[difficulty - 1])


def generate(split: str, count: int, seed: int, level: str) -> list[Row]:
    """count different problems of a split, the templates in turn; fewer where all templates have
    run out.

    Example row: {"data_source": "fraction_linear", "prompt": [{"role": "user", "content":
    "(x+3)/4=2, x?"}], "ability": "math", "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"uid": "algebra/easy/train/3", "split": "train", "level": "easy", "template":
    "fraction_linear", "solution": "x+3=8\\nAnswer: 5"}}
    """
    seen: set[str] = set()
    rows: list[Row] = []
    left, n = set(_templates(level)), 0  # templates that have run out lose their turns
    while left and len(rows) < count:
        template = _template(level, n)
        if template in left:
            draft = _draw(
                template, (seed, "algebra", level, split, template, n), level, split, seen
            )
            if draft is None:
                left.remove(template)
            else:
                seen.add(draft.core)
                rows.append(_row(draft, template, split, level, n))
        n += 1
    return rows


def warm_start(count: int, seed: int, level: str, careless: float) -> list[Row]:
    """Chats for supervised training, problems of the train side, which may repeat.

    A share `careless` of them answers at once, with another problem's answer: plausible, and mostly
    wrong. A model trained on them has two habits, and reinforcement learning a better one to find.

    Example row: {"messages": [{"role": "user", "content": "(x+3)/4=2, x?"}, {"role": "assistant",
    "content": "x+3=8\\nAnswer: 5"}]}
    """
    rows = []
    for n in range(count):
        template = _template(level, n)
        draft = _any_draft(template, (seed, "algebra", level, "warm", template, n), level)
        if _generator(seed, "algebra", level, "careless", n).random() < careless:
            guess = _any_draft(template, (seed, "algebra", level, "guess", template, n), level)
            answer = f"Answer: {guess.answer}"
        else:
            answer = solution(draft)
        rows.append({"messages": [_message("user", draft.question), _message("assistant", answer)]})
    return rows


def solution(draft: Draft) -> str:
    """The working, a line a step, and the answer line."""
    return "\n".join((*draft.steps, f"Answer: {draft.answer}"))


def is_test(core: str) -> bool:
    """Which side a problem is on; a fifth are test problems, whatever the seed, the wording and the
    size."""
    return rng.address("algebra test side", core) % 5 == 0


def write_dataset(
    folder: str | Path,
    level: str,
    num_train: int,
    num_test: int,
    num_warm: int,
    seed: int,
    careless: float,
) -> None:
    """Write train.jsonl, test.jsonl and warm.jsonl, each whole or not at all; a file of no rows is
    not written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "train.jsonl": generate("train", num_train, seed, level),
        "test.jsonl": generate("test", num_test, seed, level),
        "warm.jsonl": warm_start(num_warm, seed, level, careless),
    }
    for name, rows in files.items():
        if rows:
            _write(folder / name, rows)


def _template(level: str, n: int) -> str:
    names = list(_templates(level))
    return names[n % len(names)]


def _templates(level: str) -> dict[str, Callable[[np.random.Generator], Draft]]:
    if level not in LEVELS:
        raise UserError("there is no such algebra level", found=level, expected=" or ".join(LEVELS))
    return LEVELS[level]


def _draw(
    template: str, place: tuple[int | str, ...], level: str, split: str, seen: set[str]
) -> Draft | None:
    """The first draft at this place that is on the split's side and new; None where the template
    has run out."""
    if split not in ("train", "test"):
        raise UserError("there is no such algebra split", found=split, expected="train or test")
    make = _templates(level)[template]
    for attempt in range(_ATTEMPTS):
        draft = make(_generator(*place, attempt))
        if is_test(draft.core) == (split == "test") and draft.core not in seen:
            return draft
    return None


def _any_draft(template: str, place: tuple[int | str, ...], level: str) -> Draft:
    """A draft of the train side, which other places may have too."""
    draft = _draw(template, place, level, "train", set())
    assert draft is not None, "every template has problems on both sides"
    return draft


def _generator(*place: int | str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=rng.address(*place)))


def _row(draft: Draft, template: str, split: str, level: str, n: int) -> Row:
    return {
        "data_source": template,
        "prompt": [_message("user", draft.question)],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": draft.answer},
        "extra_info": {
            "uid": f"algebra/{level}/{split}/{n}",
            "split": split,
            "level": level,
            "template": template,
            "solution": solution(draft),
        },
    }


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _write(path: Path, rows: list[Row]) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
