"""reasoning-gym's own generators and scorers, all of them, through rows as they stand in a file."""

import json
from collections import Counter
from decimal import Decimal

import pytest

pytest.importorskip("reasoning_gym")

from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.config.schema import Data
from tandem.data.problems import read_problems
from tandem.plugins.tasks import reasoning_gym
from tandem.runtime.errors import UserError
from tandem.types import Problem

# Puzzles that come without a solution: their scorer works a given one through.
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Two problems of every data set, read from a file."""
    path = tmp_path_factory.mktemp("reasoning") / "all.jsonl"
    rows = [
        row
        for name in reasoning_gym.names()
        for row in reasoning_gym.rows([name], [], "train", 2, 3, None)
    ]
    path.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    return read_problems(str(path), Data(), key="data.train")


def test_every_data_set_of_the_package_makes_problems(problems):
    assert Counter(problem.category for problem in problems) == dict.fromkeys(
        reasoning_gym.names(), 2
    )
    assert len(reasoning_gym.names()) == 105


def test_every_scorer_gives_1_to_the_entrys_own_answer_only(problems):
    solved = [problem for problem in problems if problem.category not in WITHOUT_ANSWER]
    assert {p.category for p in problems if not p.answer} == WITHOUT_ANSWER
    for problem in solved:
        assert reasoning_gym.score(problem, f"so\n<answer>{problem.answer}</answer>") == 1.0, (
            problem.category
        )
        assert reasoning_gym.score(problem, f"so\nAnswer: {problem.answer}") == 1.0, (
            problem.category
        )
    for problem in problems:
        assert reasoning_gym.score(problem, f"it is {problem.answer}") <= 0.01, problem.category


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


def test_a_mixture_keeps_shares_and_begins_with_the_shorter():
    rows = reasoning_gym.rows(["chain_sum", "leg_counting"], [2, 1], "train", 30, 5, None)
    assert Counter(row["data_source"] for row in rows) == {"chain_sum": 20, "leg_counting": 10}
    assert rows[:12] == reasoning_gym.rows(
        ["chain_sum", "leg_counting"], [2, 1], "train", 12, 5, None
    )
    assert len({row["uid"] for row in rows}) == 30
    alone = reasoning_gym.rows(["leg_counting"], [], "train", 10, 5, None)
    assert [row for row in rows if row["data_source"] == "leg_counting"] == alone


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


def test_a_difficulty_is_a_level_of_the_data_sets_curriculum():
    easy, hard = (reasoning_gym.rows(["chain_sum"], [], "train", 20, 0, level) for level in (1, 4))
    assert sum(len(row["prompt"]) for row in easy) < sum(len(row["prompt"]) for row in hard)
    assert easy[0]["uid"] == "chain_sum/1/train/0"


@pytest.mark.parametrize(
    ("names", "weights", "level", "said"),
    [
        (["chess"], [], None, "no such data set"),
        (["composite"], [], None, "no such data set"),
        ([], [], None, "no name"),
        (["dice", "dice"], [], None, "different names"),
        (["dice"], [1, 2], None, "the weights do not fit"),
        (["dice"], [0], None, "the weights do not fit"),
        (["acre"], [], 1, "it has no curriculum"),
        (["dice"], [], 0, "1 or more"),
        (["knight_swap"], [], 1, "reasoning-gym itself refuses this difficulty"),
    ],
)
def test_what_the_package_cannot_make_is_refused(names, weights, level, said):
    with pytest.raises(UserError) as caught:
        reasoning_gym.rows(names, weights, "train", 1, 0, level)
    assert said in str(caught.value)


def test_an_exhausted_generator_keeps_the_mixtures_shares():
    alone = reasoning_gym.rows(["tower_of_hanoi"], [], "test", 1000, 0, None)
    assert 10 < len(alone) < 900
    mixed = Counter(
        row["data_source"]
        for row in reasoning_gym.rows(["tower_of_hanoi", "chain_sum"], [], "test", 3000, 0, None)
    )
    assert mixed["tower_of_hanoi"] == len(alone) and abs(mixed["chain_sum"] - len(alone)) <= 1


def test_the_command_tells_that_a_generator_has_run_out(tmp_path):
    command = [
        "generate",
        "reasoning_gym:tower_of_hanoi",
        "--split",
        "test",
        "--out",
        str(tmp_path / "r.jsonl"),
    ]
    result = CliRunner().invoke(app, command)
    count = len((tmp_path / "r.jsonl").read_text().splitlines())
    assert result.exit_code == 0 and f"{count} of 1,000: there are no more" in result.output


# ---- a model's text


def test_the_answer_is_in_the_last_tags_or_behind_the_mark():
    assert (
        reasoning_gym.answer_of("<answer>1</answer> no, <answer>\n2\n3 </answer>. Answer: 4")
        == "2\n3"
    )
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
def test_a_scorer_that_evaluates_runs_nothing_of_the_model(tmp_path, problems, text):
    for problem in problems:
        if problem.category in (*reasoning_gym.EVAL_LITERAL, *reasoning_gym.EVAL_EXPRESSION):
            assert (
                reasoning_gym.score(problem, "Answer: " + text.format(tmp_path / "escaped")) < 0.1
            )
    assert list(tmp_path.iterdir()) == []


def test_the_hostile_texts_do_escape_from_the_package_itself(tmp_path, problems):
    """Else the test before would say nothing."""
    import reasoning_gym as package

    for name in ("binary_matrix", "puzzle24"):
        answer = HOSTILE[1].format(tmp_path / name)
        [problem, _] = [problem for problem in problems if problem.category == name]
        entry = reasoning_gym._from_json(problem.metadata["reasoning_gym"]["entry"])
        package.get_score_answer_fn(name)(answer, entry)
    assert "binary_matrix" in {file.name for file in tmp_path.iterdir()}


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


def test_a_problem_of_another_source_is_told():
    with pytest.raises(ValueError, match="no column reasoning_gym"):
        reasoning_gym.score(Problem(uid="a", messages=(), answer="3"), "Answer: 3")
