"""reasoning-gym's generators and scorers, by name; needs the extra `reasoning-gym`.

A row carries everything for its scorer. Knows the package's entries. Does not know models.

    tandem generate reasoning_gym:chain_sum,leg_counting --weights 2,1 --count 400 --out train.jsonl
    tandem train my.toml data.train=train.jsonl reward=reasoning_gym
"""

import ast
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

from tandem.data.mixture import owners, taken_by
from tandem.plugins.tasks.generate import Row, check_split, is_test
from tandem.rewards.builtin import behind_thoughts
from tandem.runtime import rng
from tandem.runtime.errors import UserError, not_installed
from tandem.types import Problem

try:
    import reasoning_gym
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum
except ModuleNotFoundError as missing:
    raise not_installed(f"{missing.name}", "reasoning-gym", where="reasoning_gym") from None

# Entries made under one seed. Fixed: entries of some generators depend on how many there are.
CHUNK = 500
# After so many entries without a new question a generator has, for practical purposes, run out.
BARREN = 4 * CHUNK

# Data sets whose scorers hand the model's text to eval, as a literal or an expression of sympy.
EVAL_LITERAL = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
EVAL_EXPRESSION = (
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
)


def names() -> list[str]:
    """List every data set but `composite`, for which there are weights."""
    return sorted(set(DATASETS) - {"composite"})


def rows(
    datasets: Sequence[str],
    weights: Sequence[float],
    split: str,
    count: int,
    seed: int,
    difficulty: int | None,
) -> list[Row]:
    """Draw count different questions, each data set its share; fewer if one runs out.

    difficulty: a level of each curriculum, 1 the lowest; None: each data set's default. Raises
    UserError.

    Example row: {"uid": "leg_counting/train/0", "prompt": "Your task is to count how many legs
    ...", "answer": "26", "data_source": "leg_counting", "reasoning_gym": {"dataset":
    "leg_counting", "difficulty": None, "entry": {...}}}
    """
    check_split("reasoning_gym", split)
    unknown = [name for name in datasets if name not in names()]
    if unknown or len(set(datasets)) < len(datasets) or not datasets:
        found = unknown[0] if unknown else ",".join(datasets) or "no name"
        expected = f"different names out of {', '.join(names())}"
        raise UserError(
            "there is no such data set in reasoning-gym", found=found, expected=expected
        )
    if weights and (len(weights) != len(datasets) or min(weights) <= 0):
        raise UserError(
            "the weights do not fit the data sets",
            where="--weights",
            found=str(list(weights)),
            expected=f"{len(datasets)} numbers above 0",
        )
    shares = [Fraction(str(weight)) for weight in weights or [1.0] * len(datasets)]
    sources = [_rows_of(name, split, seed, difficulty) for name in datasets]
    rows: list[Row] = []
    for part in owners([taken_by(slots, shares) for slots in range(count + 1)]):
        row = next(sources[part], None)
        if row is None:
            break
        rows.append(row)
    return rows


def _rows_of(name: str, split: str, seed: int, difficulty: int | None) -> Iterator[Row]:
    """Make rows of the split, no question twice."""
    level, seen = "" if difficulty is None else f"/{difficulty}", set[str]()
    chunk = barren = 0
    while barren < BARREN:
        chunk_seed = rng.address(seed, "reasoning_gym", name, chunk) % 2**31
        entries = _dataset(name, difficulty, chunk_seed, CHUNK)
        for i in range(CHUNK):
            entry = entries[i]
            question = entry["question"]
            is_new = question not in seen and is_test(question) == (split == "test")
            barren = 0 if is_new else barren + 1
            if not is_new:
                continue
            made = {"dataset": name, "difficulty": difficulty, "entry": _to_json(entry)}
            yield {
                "uid": f"{name}{level}/{split}/{len(seen)}",
                "prompt": question,
                # some puzzles come without a solution, and their scorer works a given one through
                "answer": str(entry["answer"] or ""),
                "data_source": name,
                "reasoning_gym": made,
            }
            seen.add(question)
        chunk += 1


def _dataset(name: str, difficulty: int | None, seed: int, size: int) -> Any:
    if difficulty is None:
        return reasoning_gym.create_dataset(name, seed=seed, size=size)
    if name not in CURRICULA or difficulty < 1:
        raise UserError(
            "there is no such difficulty",
            where=name,
            found=str(difficulty),
            expected="1 or more" if name in CURRICULA else "none: it has no curriculum",
        )
    curriculum = create_curriculum(name)
    curriculum.set_global_level(difficulty - 1)
    try:
        return DATASETS[name][0](curriculum.generate_configuration({"seed": seed, "size": size}))
    except AssertionError as error:  # its own check of what its own curriculum says
        raise UserError(
            "reasoning-gym itself refuses this difficulty",
            where=name,
            found=f"{difficulty}: {error}",
            expected="another difficulty, or none",
        ) from None


_scorer = cache(_dataset)


# ---------------------------------------------------------------- the scorer


def score(problem: Problem, completion: str) -> float:
    """Score the completion's answer by the data set's own scorer, 0 to 1.

    Text that the scorer would evaluate must be a literal, or arithmetic; else it scores as no
    answer. Raises ValueError for a problem of another source.
    """
    if "reasoning_gym" not in problem.metadata:
        raise ValueError("the problem is not of reasoning-gym: its row has no column reasoning_gym")
    column = problem.metadata["reasoning_gym"]
    entry, answer = _from_json(column["entry"]), answer_of(completion)
    if answer != entry["answer"] and not _is_harmless(column["dataset"], answer or ""):
        answer = None
    # some scorers read the entry's config, none its seed and size
    scorer = _scorer(column["dataset"], column["difficulty"], 0, 1)
    return float(scorer.score_answer(answer, entry))


def answer_of(completion: str) -> str | None:
    """Return the text in the last <answer>...</answer>, else behind the last `Answer:`, else
    None."""
    tagged = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    if tagged:
        return str(tagged[-1].strip())
    _, mark, rest = completion.rpartition("Answer:")
    return rest.strip() if mark else None


def _is_harmless(dataset: str, answer: str) -> bool:
    """Tell whether the scorer may evaluate an answer: a literal, text that is no Python, or
    arithmetic."""
    if dataset not in EVAL_LITERAL:
        return dataset not in EVAL_EXPRESSION or _is_arithmetic(answer)
    try:
        ast.literal_eval(answer.strip())
    except SyntaxError:
        return True
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


_FUNCTIONS = {"sqrt", "exp", "log", "ln", "sin", "cos", "tan", "asin", "acos", "atan"}
_FUNCTIONS |= {"sinh", "cosh", "tanh", "Abs"}
_NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load)


def _is_arithmetic(text: str) -> bool:
    """Tell whether a text is but numbers, one-letter names, operators and _FUNCTIONS."""
    try:
        nodes = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in nodes:
        match node:
            case ast.Constant(value=value):
                known = type(value) in (int, float)
            case ast.Name(id=name):
                known = len(name) == 1 or name in _FUNCTIONS | {"pi"}
            case ast.Call(func=ast.Name(id=name), keywords=[]):
                known = name in _FUNCTIONS
            case _:
                known = isinstance(node, _NODES)
        if not known:
            return False
    return True


# ---------------------------------------------------------------- entries as JSON
# Tuples, sets and keys come back as they were, because scorers compare them.


def _to_json(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_to_json(child) for child in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _to_json(child) for key, child in value.items()}
        case dict():
            return {"$pairs": [[_to_json(key), _to_json(child)] for key, child in value.items()]}
        case tuple():
            return {"$tuple": [_to_json(child) for child in value]}
        case set() | frozenset():
            return {"$set": sorted(map(_to_json, value), key=repr)}
        case _:
            return str(value)  # times, and numbers of numpy


def _from_json(value: Any) -> Any:
    match value:
        case list():
            return [_from_json(child) for child in value]
        case {"$pairs": pairs}:
            return {_from_json(key): _from_json(child) for key, child in pairs}
        case {"$tuple": children}:
            return tuple(_from_json(child) for child in children)
        case {"$set": children}:
            return {_from_json(child) for child in children}
        case dict():
            return {key: _from_json(child) for key, child in value.items()}
        case _:
            return value


reward = behind_thoughts(score)
