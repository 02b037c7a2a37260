"""reasoning-gym's own generators and scorers, all of them, through rows as they stand in a file."""

import json
from collections import Counter
from decimal import Decimal

import pytest

pytest.importorskip("reasoning_gym")


from tandem.config.schema import Data
from tandem.data.problems import read_problems
from tandem.plugins.tasks import reasoning_gym
from tandem.types import Problem

# Puzzles that come without a solution: their scorer works a given one through.
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def read(folder, names):
    """Two problems of each data set, read from a file."""
    path = folder / "rows.jsonl"
    rows = [row for name in names for row in reasoning_gym.rows([name], [], "train", 2, 3, None)]
    path.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    return read_problems(str(path), Data(), key="data.train")


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    return read(tmp_path_factory.mktemp("all"), reasoning_gym.names())


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Problems whose scorers evaluate the model's text."""
    names = (*reasoning_gym.EVAL_LITERAL, *reasoning_gym.EVAL_EXPRESSION)
    return read(tmp_path_factory.mktemp("evaluated"), names)


def test_every_data_set_of_the_package_makes_problems(problems):
    assert Counter(problem.category for problem in problems) == dict.fromkeys(
        reasoning_gym.names(), 2
    )
    assert len(reasoning_gym.names()) == 105


def test_every_scorer_gives_1_to_the_entrys_own_answer_only(problems):
    solved = [problem for problem in problems if problem.category not in WITHOUT_ANSWER]
    assert {p.category for p in problems if not p.answer} == WITHOUT_ANSWER
    for form in ("so\n<answer>{}</answer>", "so\nAnswer: {}"):
        scores = {p.uid: reasoning_gym.score(p, form.format(p.answer)) for p in solved}
        assert scores == dict.fromkeys(scores, 1.0)
    scores = {p.uid: reasoning_gym.score(p, f"it is {p.answer}") for p in problems}
    assert {uid: score for uid, score in scores.items() if score > 0.01} == {}


def test_a_puzzle_without_an_answer_is_worked_through():
    [row] = reasoning_gym.rows(["graph_color"], [], "train", 1, 0, None)
    [problem] = [problem_of(row)]
    puzzle = reasoning_gym._from_json(row["reasoning_gym"]["entry"])["metadata"]["puzzle"]
    colors = {}
    assert search(puzzle, colors)
    assert reasoning_gym.score(problem, f"Answer: {json.dumps(colors)}") == 1.0
    same = dict.fromkeys(colors, puzzle["color_options"][0])
    assert reasoning_gym.score(problem, f"Answer: {json.dumps(same)}") < 0.1


def search(puzzle, colors):
    """A colouring by trying."""
    left = [str(vertex) for vertex in puzzle["vertices"] if str(vertex) not in colors]
    if not left:
        return True
    edges = [(str(a), str(b)) for a, b in puzzle["edges"]]
    near = {colors.get(b if a == left[0] else a) for a, b in edges if left[0] in (a, b)}
    for color in puzzle["color_options"]:
        if color not in near:
            colors[left[0]] = color
            if search(puzzle, colors):
                return True
            del colors[left[0]]
    return False


def problem_of(row):
    metadata = json.loads(json.dumps({"reasoning_gym": row["reasoning_gym"]}))
    messages = ({"role": "user", "content": row["prompt"]},)
    return Problem(uid=row["uid"], messages=messages, answer=row["answer"], metadata=metadata)


def test_partial_credit_and_config_are_the_packages():
    """decimal_arithmetic compares to as many places as its config says, which differs by
    difficulty."""
    [row] = reasoning_gym.rows(["decimal_arithmetic"], [], "train", 1, 0, 2)
    assert reasoning_gym.score(problem_of(row), f"Answer: {row['answer']}") == 1.0
    close = f"Answer: {Decimal(row['answer']) + Decimal('0.0005')}"
    assert reasoning_gym.score(problem_of(row), close) == 0.0
    as_by_default = problem_of(
        {**row, "reasoning_gym": row["reasoning_gym"] | {"difficulty": None}}
    )
    assert reasoning_gym.score(as_by_default, close) == 1.0
    [spiral] = reasoning_gym.rows(["spiral_matrix"], [], "train", 1, 0, None)
    as_list = str([int(part) for part in spiral["answer"].split()])
    assert 0 < reasoning_gym.score(problem_of(spiral), f"Answer: {as_list}") < 1


# ---- mixtures


def test_train_and_test_never_meet_and_no_question_comes_twice():
    sides = [
        [
            row["prompt"]
            for seed in range(3)
            for row in reasoning_gym.rows(["coin_flip"], [], split, 40, seed, None)
        ]
        for split in ("train", "test")
    ]
    assert not set(sides[0]) & set(sides[1])
    assert len(set(sides[0][:40])) == 40


# ---- a model's text


def test_the_answer_is_in_the_last_tags_or_behind_the_mark():
    twice = "<answer>1</answer> no, <answer>\n2\n3 </answer>. Answer: 4"
    assert reasoning_gym.answer_of(twice) == "2\n3"
    assert reasoning_gym.answer_of("Answer: 1\nAnswer: 2\n3\n") == "2\n3"
    assert reasoning_gym.answer_of("it is 7") is None


HOSTILE = [
    "__import__('pathlib').Path('{0}').touch()",
    "[open('{0}', 'w') for _ in (1,)]",
    "open('{0}', 'w')",
    "exec(\"open('{0}', 'w')\")",
    "(lambda: open('{0}', 'w'))()",
    "sqrt(open('{0}', 'w'))",
    'sqrt(\'open("{0}", "w")\')',
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_scorer_that_evaluates_runs_nothing_of_the_model(tmp_path, evaluated, text):
    answer = "Answer: " + text.format(tmp_path / "escaped")
    assert max(reasoning_gym.score(problem, answer) for problem in evaluated) < 0.1
    assert list(tmp_path.iterdir()) == []


def test_every_scorer_that_evaluates_is_known():
    """By its source, so that a new version of the package with one more is seen."""
    import inspect

    from reasoning_gym.factory import DATASETS

    calls = ("eval(answer", "parse_expr(answer")
    found = {
        name
        for name in reasoning_gym.names()
        if any(call in inspect.getsource(DATASETS[name][0].score_answer) for call in calls)
    }
    own_parser = {"propositional_logic"}
    assert found - own_parser == {*reasoning_gym.EVAL_LITERAL, *reasoning_gym.EVAL_EXPRESSION}
