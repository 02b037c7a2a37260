"""The generated tasks, judged by arithmetic that knows nothing of how they were made, and `tandem
generate`."""

import ast
import json
import operator
import re
from collections import Counter

import pytest

from tandem.config.schema import Data
from tandem.data.problems import read_problems
from tandem.plugins.tasks import algebra, arithmetic, calculator, countdown, guess, squares
from tandem.plugins.tasks.cli import generate
from tandem.plugins.tasks.generate import is_test
from tandem.registry import BUILT_IN, find
from tandem.runtime.errors import UserError

LEVELS = {
    "algebra": [1, 2],
    "arithmetic": range(1, 7),
    "calculator": [1, 2, 3],
    "countdown": range(2, 7),
    "guess": range(1, 7),
    "squares": range(1, 5),
}
TASKS = list(BUILT_IN["tasks"])
PLENTY = ("calculator", "squares")  # tasks that do not run out
CASES = [(task, level) for task in TASKS for level in LEVELS[task]]
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def value(text):
    """Return the value of an expression of whole numbers."""

    def of(node):
        match node:
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATORS[type(op)](of(left), of(right))
            case ast.Constant(value=int() as number):
                return number
        raise AssertionError(ast.dump(node))

    return of(ast.parse(text, mode="eval").body)


def numbers(text):
    return [int(digits) for digits in re.findall(r"\d+", text)]


def rows_of(task, *place):
    return find("tasks", task, key="task").rows(*place)


# ---- every task


@pytest.mark.parametrize(("task", "level"), CASES)
def test_a_longer_set_begins_with_the_shorter_seeds_differ(task, level):
    assert rows_of(task, "train", 15, 7, level) == rows_of(task, "train", 40, 7, level)[:15]
    assert rows_of(task, "train", 15, 8, level) != rows_of(task, "train", 15, 7, level)


def told(row):
    return json.dumps([row["prompt"], row.get("answer"), row.get("images")])


@pytest.mark.parametrize(("task", "level"), CASES)
def test_train_and_test_never_meet_whatever_the_seed(task, level):
    train, test = (
        {told(row) for seed in range(3) for row in rows_of(task, split, 20, seed, level)}
        for split in ("train", "test")
    )
    assert not train & test


@pytest.mark.parametrize(("task", "level"), CASES)
def test_rows_are_problems_with_a_uid_and_a_category(tmp_path, task, level):
    rows = rows_of(task, "train", 20, 0, level)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = read_problems(str(tmp_path / "rows.jsonl"), Data(), key="data.train")
    assert [p.category for p in problems] == [row["data_source"] for row in rows]
    assert all(p.uid.startswith(f"{task}/") for p in problems)


@pytest.mark.parametrize("module", [algebra, arithmetic, calculator, countdown, guess, squares])
def test_other_difficulties_and_splits_are_refused(module):
    for level in (0, 7, -1):
        with pytest.raises(UserError, match="no such difficulty"):
            module.TASK.rows("train", 1, 0, level)
    with pytest.raises(UserError, match="no such"):
        module.TASK.rows("val", 1, 0, 2)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_with_too_few_problems_gives_all_of_them(task):
    rows = rows_of(task, "test", 1000, 0, LEVELS[task][0])
    assert rows[:20] == rows_of(task, "test", 20, 0, LEVELS[task][0])
    assert len(set(map(told, rows))) == len(rows) and (len(rows) == 1000) == (task in PLENTY)


# ---- each task


@pytest.mark.parametrize(
    ("level", "terms", "length"), [(1, 2, 1), (2, 2, 2), (3, 3, 2), (4, 3, 3), (5, 4, 3), (6, 5, 4)]
)
def test_an_arithmetic_answer_is_what_the_prompt_says(level, terms, length):
    for row in arithmetic.TASK.rows("train", 60, 0, level):
        expression = row["prompt"].removesuffix("=?")
        assert row["answer"] == str(value(expression))
        assert [len(str(number)) for number in numbers(expression)] == [length] * terms
        assert sum(row["terms"]) == int(row["answer"])


def test_a_sum_in_another_order_is_the_same_problem():
    sums = [
        tuple(sorted(row["terms"]))
        for split in ("train", "test")
        for row in arithmetic.TASK.rows(split, 20, 0, 1)
    ]
    assert len(sums) == len(set(sums))
    assert {
        split: {is_test(str(list(x))) for x in sums[i : i + 20]}
        for i, split in ((0, "train"), (20, "test"))
    } == {"train": {False}, "test": {True}}


@pytest.mark.parametrize("level", LEVELS["countdown"])
def test_a_countdown_solution_reaches_the_target_once_each(level):
    for row in countdown.TASK.rows("train", 60, 0, level):
        target, *given = numbers(row["prompt"])
        assert given == row["numbers"] and len(given) == level
        assert value(row["solution"]) == target == int(row["answer"])
        assert Counter(numbers(row["solution"])) == Counter(given)
        assert target not in given


@pytest.mark.parametrize("level", LEVELS["calculator"])
def test_a_calculator_answer_is_what_its_expression_is_worth(level):
    rows = calculator.TASK.rows("train", 60, 0, level)
    for row in rows:
        assert row["prompt"] == f"{row['expression']}=?"
        assert row["answer"] == str(value(row["expression"]))
    assert {sign for row in rows for sign in "+-*" if sign in row["expression"]} >= {"+", "*"}


@pytest.mark.parametrize("level", LEVELS["guess"])
def test_a_secret_lies_in_its_range_and_not_in_the_prompt(level):
    for row in guess.TASK.rows("train", 60, 0, level):
        assert row["low"] <= int(row["answer"]) <= row["high"]
        assert row["high"] - row["low"] + 1 == 2 ** (level + 2)
        assert numbers(row["prompt"]) == [row["low"], row["high"]]


# ---- the command


def write(out, task="guess", **changed):
    generate(task, out, **{"count": 5, **changed})
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_the_command_writes_the_rows_of_the_task(tmp_path):
    assert write(tmp_path / "new/g.jsonl", seed=3, split="test") == guess.TASK.rows("test", 5, 3, 1)
    again = write(tmp_path / "new/g.jsonl", task="algebra", difficulty=2, force=True)
    assert again == algebra.rows("train", 5, 0, 2)
