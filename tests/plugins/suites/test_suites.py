"""Benchmarks by name: rows made up in the form that each has on the hub, read and graded."""

import asyncio
import json
import shutil

import pytest

from tandem.config.episodes import Data, Env
from tandem.config.schema import Config
from tandem.data.problems import read_problems
from tandem.data.readers import source_files
from tandem.plugins.suites.bfcl import FunctionsEnv
from tandem.plugins.suites.suites import suite_options
from tandem.registry import names
from tandem.rewards.load import load
from tandem.rewards.parts import BadValue
from tandem.runtime.errors import UserError
from tandem.types import Attempt, Problem

ASKED = {"problem": "What is 20 + 22?", "answer": "42"}
MAXIMUM = 'def top(a, b):\n    """Return the larger.\n    >>> top(1, 2)\n    2\n    """\n'
# by suite: a row as its data set has it, made up; a right completion; a wrong one
ROWS = {
    "gsm8k": (
        {
            "question": "Ann has 1,000 eggs and buys 5.",
            "answer": "1000+5=<<1000+5=1005>>\n#### 1,005",
        },
        "So \\boxed{1005}.",
        "\\boxed{1000}, then 1005",
    ),
    "math500": ({**ASKED, "answer": "\\frac{1}{2}"}, "\\boxed{\\dfrac12}", "\\boxed{2}"),
    "aime24": (ASKED, "<think>\\boxed{7}</think>\\boxed{42}", "\\boxed{42}</think>\\boxed{7}"),
    "aime25": ({**ASKED, "answer": "042"}, "\\boxed{42}", "42"),
    "amc": ({"question": "What is 20 + 7?", "answer": "27.0"}, "\\boxed{27}", "\\boxed{20}"),
    "gpqa": (
        {
            "Question": "Which is a metal?",
            "Correct Answer": "iron\n",
            **{f"Incorrect Answer {i}": gas for i, gas in enumerate(("neon", "argon", "xenon"), 1)},
        },
        None,
        None,
    ),
    "mmlu_pro": (
        {
            "question": "Which is even?",
            "options": ["one", "three", "five", "seven", "eight"],
            "answer": "E",
            "answer_index": 4,
        },
        "It is eight.\nAnswer: E",
        "Answer: A",
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": MAXIMUM,
            "entry_point": "top",
            "test": "def check(candidate):\n    for i in range(3):\n"
            "        assert candidate(i, 1) == max(i, 1)\n",
        },
        "```python\ndef top(a, b):\n    return a if a > b else b\n```",
        "```python\ndef top(a, b):\n    return 1\n```",
    ),
    "mbpp": (
        {
            "text": "Write a function to add two numbers.",
            "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
            "test_setup_code": "",
        },
        "```\ndef add(a, b):\n    return a + b\n```",
        "```\ndef add(a, b):\n    return 0\n```",
    ),
    "ifeval": (
        {
            "key": 1000,
            "prompt": "Write of rain in lowercase, in at least 3 words, without commas.",
            "instruction_id_list": [
                "change_case:english_lowercase",
                "punctuation:no_comma",
                "length_constraints:number_words",
            ],
            "kwargs": [{}, {}, {"relation": "at least", "num_words": 3, "keyword": None}],
        },
        "<think>Rain, OK</think>the rain is falling on the roof of the house",
        "the rain, it is falling on the roof of the house",
    ),
}
PROGRAMS = ("humaneval", "mbpp")


def told(name, text):
    """A call in Hermes' form."""
    return f'<tool_call>{{"name": "{name}", "arguments": {text}}}</tool_call>'


ABOUT = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "price": {"type": "float", "description": "At most."},
    "stops": {"type": "array", "items": {"type": "string"}},
}
PARAMETERS = {"type": "dict", "properties": ABOUT, "required": ["city", "days"]}
FUNCTIONS = [{"name": "trip.book", "description": "Book a trip.", "parameters": PARAMETERS}]
RIGHT = {"city": ["New York", "NYC"], "days": [3], "price": ["", 90.0], "stops": ["", ["Rome", 2]]}
BOOK = told("trip.book", '{"city": "new-york", "days": 3}')
TWO = told("trip.book", '{"city": "Rome", "days": 3}') + told(
    "trip.book", '{"city": "NYC", "days": 3, "stops": ["rome", 2]}'
)
TEXTS = ('"days": 3', '"days": "3"', '"days": 4', '"days": 3, "seat": 1', '"price": 9')
# made up as of BFCL: an id, its answers, completions that are right, and that are wrong
CALLS = [
    (
        "simple_0",
        [RIGHT],
        [BOOK, told("trip.book", '{"city": "NYC", "days": 3, "price": 90}')],
        [*(told("trip.book", f'{{"city": "Rio", {text}}}') for text in TEXTS), BOOK + BOOK, "NYC"]
        + [told("trip.book", f'{{"city": "NYC", {text}}}') for text in TEXTS[1:]],
    ),
    (
        "parallel_0",
        [{**RIGHT, "stops": [["Rome", 2]]}, {**RIGHT, "city": ["Rome"]}],
        [TWO],
        [BOOK, TWO + BOOK, TWO.replace("Rome", "NYC"), BOOK + "<tool_call>{</tool_call>"],
    ),
    ("irrelevance_0", None, ["No function fits.", "<tool_call>{</tool_call>"], [BOOK]),
]


def rows_of(suite, folder):
    file = folder / f"{suite}.jsonl"
    file.write_text(json.dumps(ROWS[suite][0]) + "\n", encoding="utf-8")
    return f"{suite}={file}"


def grade(problem, text, **options):
    return load("suite", options)(problem, Attempt(text=text))[0]


def test_bfcl_shows_functions_and_grades_calls_by_names_arguments_and_types(tmp_path):
    (tmp_path / "possible_answer").mkdir()
    for id, answers, _, _ in CALLS:
        name, asked = f"BFCL_v4_{id[:-2]}.json", [[{"role": "user", "content": f"Book {id}."}]]
        row = {"id": id, "question": asked, "function": FUNCTIONS}
        (tmp_path / name).write_text(json.dumps(row))
        if answers is not None:
            truth = {"id": id, "ground_truth": [{"trip.book": one} for one in answers]}
            (tmp_path / "possible_answer" / name).write_text(json.dumps(truth))
    source = f"suite:bfcl={tmp_path}"
    config = Config(eval={"data": source}, data={"train": "own.jsonl"})
    with pytest.raises(UserError, match="shows functions"):
        suite_options(config)
    assert suite_options(config.model_copy(update={"env": Env(name="functions")})) == {
        "graders": ["tandem.plugins.suites.bfcl:right_calls"]
    }
    assert len(source_files(source, "eval.data")) == 5
    problems = read_problems(source, Data(), key="eval.data")
    assert [p.category for p in problems] == ["bfcl_simple", "bfcl_parallel", "bfcl_irrelevance"]
    env = FunctionsEnv()
    assert asyncio.run(env.reset(problems[0])) == problems[0].messages
    [tool] = env.tools
    assert tool["function"]["parameters"]["properties"]["price"]["type"] == "number"
    for problem, (_, _, right, wrong) in zip(problems, CALLS, strict=True):
        assert [grade(problem, text) for text in right] == [1.0] * len(right)
        assert [grade(problem, text) for text in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize("suite", ROWS)
def test_the_rows_of_a_suite_are_graded_by_its_own_grader(suite, tmp_path):
    if suite in PROGRAMS and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    if suite == "ifeval":
        pytest.importorskip("lm_eval", reason="needs pip install 'tandem-rl[evals]'")
    # the columns of other data do not matter to it
    columns = Data(prompt_column="chat", answer_column="")
    [problem] = read_problems("suite:" + rows_of(suite, tmp_path), columns, key="eval.data")
    assert (problem.uid, problem.category) == (f"{suite}/1", suite)
    _, right, wrong = ROWS[suite]
    if suite == "gpqa":  # the place of the right answer is drawn
        prompt = problem.messages[0]["content"]
        assert f"\n{problem.answer}) iron" in prompt and prompt.index("A)") < prompt.index("D)")
        right, wrong = (
            f"Answer: {letter}" for letter in (problem.answer, "ABCD".strip(problem.answer)[0])
        )
    assert grade(problem, right) == 1.0
    assert grade(problem, wrong) == 0.0


def test_every_suite_has_a_made_up_row():
    assert set(names("suites")) == {*ROWS, "bfcl"}


def test_several_suites_are_one_source_whose_prompts_say_how_to_answer(tmp_path):
    source = "suite:" + ",".join(rows_of(suite, tmp_path) for suite in ROWS)
    problems = read_problems(source, Data(system="Be brief."), key="eval.data")
    assert [problem.category for problem in problems] == list(ROWS)
    for problem in problems:
        system, user = problem.messages
        assert system["content"] == "Be brief."
        assert any(word in user["content"] for word in ("\\boxed{}", "$LETTER", "code", "Write"))
    assert read_problems(source, Data(system="Be brief."), key="eval.data") == problems


def test_only_programs_need_the_sandbox_of_a_run(tmp_path):
    def config(*suites):
        return Config(eval={"data": "suite:" + ",".join(suites)}, data={"train": "own.jsonl"})

    assert suite_options(config("gsm8k", "gpqa")) == {"graders": ["answer", "choice"]}
    assert list(suite_options(config("gsm8k", "mbpp"))) == ["graders", "sandbox"]


def test_rows_of_no_suite_are_graded_by_the_reward_that_is_named_for_them():
    own = Problem(uid="own/1", messages=(), answer="yes")
    assert grade(own, "yes", otherwise="exact") == 1.0
    with pytest.raises(BadValue, match=r"otherwise"):
        grade(own, "yes")


@pytest.mark.parametrize(
    ("name", "row", "found"),
    [
        ("gsm8", {}, "did you mean gsm8k?"),
        ("gsm8k", {"text": "1+1"}, "columns text"),
        ("mbpp", {"text": 3}, "columns text"),
    ],
)
def test_an_unknown_suite_and_a_row_of_another_form_are_told(name, row, found, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(UserError) as error:
        read_problems(f"suite:{name}={file}", Data(), key="eval.data")
    assert found in str(error.value)
