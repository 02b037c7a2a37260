"""The algebra data set, judged by a solver that reads the question's text and knows nothing of how
it was made."""

import re
from collections import Counter
from pathlib import Path

import pytest
import sympy
from sympy.parsing.sympy_parser import (
    convert_xor,
    implicit_multiplication_application,
    parse_expr,
    standard_transformations,
)

from tandem.plugins.tasks import algebra
from tandem.plugins.tasks.algebra import warm_start
from tandem.plugins.tasks.algebra_templates import SCHOOL_FORMAT, TEMPLATES
from tandem.plugins.tasks.generate import is_test
from tandem.runtime.disk import write_rows
from tandem.runtime.errors import UserError

X, Y = sympy.symbols("x y")
COMMITTED = Path(__file__).parents[3] / "data" / "algebra"
EASY, SCHOOL = LEVELS = (1, 2)
RULES = (*standard_transformations, convert_xor, implicit_multiplication_application)


# ---------------------------------------------------------------- the independent solver


def expression(text):
    text = re.sub(r"\|(.+?)\|", r"Abs(\1)", text)
    return parse_expr(text, local_dict={"x": X, "y": Y}, transformations=RULES, evaluate=True)


def question(row):
    return row["prompt"][0]["content"].removesuffix("\n" + SCHOOL_FORMAT)


def equations(text):
    """Every 'left = right' in a question, read as far as mathematics goes on both sides."""
    side = r"[-+*/^()|xy0-9. ]*[)|xy0-9]"
    found = re.findall(rf"({side})\s*=\s*(-?[xy0-9](?:[-+*xy0-9 ]*[xy0-9])?)", text)
    return [sympy.Eq(expression(left), expression(right)) for left, right in found]


def largest_solution(text):
    (equation,) = equations(text)
    return max(sympy.solveset(equation, X, sympy.S.Reals))


def only_solution(text):
    (equation,) = equations(text)
    (solution,) = sympy.solveset(equation, X, sympy.S.Reals)
    return sympy.nsimplify(sympy.simplify(solution))


def sum_of_solutions(text):
    (solution,) = sympy.linsolve(equations(text), X, Y)
    return sum(solution)


def term_of_sequence(text):
    shown, n = re.search(r"(-?\d+, ?-?\d+, ?-?\d+).*?term (?:number )?(\d+)", text).groups()
    first, second, third = (int(value) for value in shown.split(","))
    assert third - second == second - first
    terms = [first]
    while len(terms) < int(n):
        terms.append(terms[-1] + second - first)
    return terms[-1]


def remainder(text):
    short = re.match(r"\((.+)\)/\((.+)\), rest\?", text)
    dividend, divisor = (short or re.search(r"when (.+) is divided by (.+)[.?]", text)).groups()
    return sympy.rem(expression(dividend), expression(divisor), X)


SOLVERS = {
    "absolute_shift": largest_solution,
    "arith_sequence": term_of_sequence,
    "exponent_linear": only_solution,
    "fraction_linear": only_solution,
    "linear_nested": only_solution,
    "poly_remainder": remainder,
    "quadratic_root": largest_solution,
    "system_combo": sum_of_solutions,
}


@pytest.fixture(scope="module", params=LEVELS)
def rows(request):
    return algebra.rows("train", 96, 7, request.param) + algebra.rows("test", 40, 7, request.param)


def test_an_independent_solver_finds_every_label_in_the_text(rows):
    for row in rows:
        solved = SOLVERS[row["data_source"]](question(row))
        assert sympy.Rational(row["reward_model"]["ground_truth"]) == solved, row


def test_labels_are_written_in_lowest_terms(rows):
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        assert truth == str(sympy.Rational(truth))


# ---------------------------------------------------------------- worked solutions


def unknowns(row):
    """The values under which every line of the working must hold."""
    text = question(row)
    match row["data_source"]:
        case "system_combo":
            (solution,) = sympy.linsolve(equations(text), X, Y)
            return dict(zip((X, Y), solution, strict=True))
        case "poly_remainder":
            (zero,) = sympy.solve(
                expression(re.search(r"x [-+] \d+(?=[.?]$)|(?<=/\()x-\d+", text)[0]), X
            )
            return {X: zero}
        case "arith_sequence":
            return {}
        case _:
            return {X: sympy.Rational(row["reward_model"]["ground_truth"])}


def check_line(line, values):
    """Both sides of an equation are equal under the values; of alternatives, one is enough."""
    results = []
    for alternative in line.split(" or "):
        left, right = (expression(side).subs(values) for side in alternative.split("="))
        results.append(sympy.simplify(left - right) == 0)
    return any(results)


def test_every_line_of_the_working_is_true(rows):
    checked = Counter()
    for row in rows:
        values = unknowns(row)
        *steps, _ = row["extra_info"]["solution"].split("\n")
        assert steps
        for line in steps:
            if "=" in line:
                assert check_line(line, values), (line, row)
                checked[row["data_source"]] += 1
            else:  # a sum still to be added up is already the answer
                assert expression(line) == sympy.Rational(row["reward_model"]["ground_truth"]), (
                    line,
                    row,
                )
    assert sum(checked.values()) > len(rows) / 2


def test_school_factors_give_the_polynomial_and_both_roots():
    rows = [
        r for r in algebra.rows("train", 160, 3, SCHOOL) if r["data_source"] == "quadratic_root"
    ]
    for row in rows:
        factors, roots, _ = row["extra_info"]["solution"].split("\n")
        (equation,) = equations(question(row))
        assert sympy.expand(expression(factors.split(" = ")[0]) - equation.lhs) == 0
        named = {sympy.Rational(r.split(" = ")[1]) for r in roots.split(" or ")}
        assert named == set(sympy.solve(equation, X)) and len(named) == 2


def test_every_worked_solution_ends_in_the_right_answer_line(rows):
    for row in rows:
        assert (
            row["extra_info"]["solution"].split("\n")[-1]
            == f"Answer: {row['reward_model']['ground_truth']}"
        )


def test_easy_problems_stay_short_as_a_character_is_a_token():
    for row in algebra.rows("train", 200, 0, EASY):
        assert len(question(row)) <= 30
        assert len(row["extra_info"]["solution"]) <= 30
        assert re.fullmatch(r"-?\d{1,2}", row["reward_model"]["ground_truth"])


# ---------------------------------------------------------------- the two sides and the seeds


@pytest.mark.parametrize("level", LEVELS)
def test_templates_come_in_turn_and_in_equal_numbers(level):
    rows = algebra.rows("train", 64, 0, level)
    assert [row["data_source"] for row in rows] == list(TEMPLATES) * 8


@pytest.mark.parametrize("level", LEVELS)
def test_train_of_any_seed_never_meets_test(level):
    test = {question(r) for seed in range(3) for r in algebra.rows("test", 64, seed, level)}
    train = {question(r) for seed in range(3) for r in algebra.rows("train", 256, seed, level)}
    warm = {
        row["messages"][0]["content"].removesuffix("\n" + SCHOOL_FORMAT)
        for row in warm_start(512, 5, level, 0.5)
    }
    assert not test & (train | warm)


def test_the_side_of_a_problem_does_not_depend_on_its_wording():
    def mathematics(row):
        return re.sub(r"\D*?(-?\d+)", r"\1 ", question(row))

    test = {
        mathematics(r)
        for r in algebra.rows("test", 128, 0, SCHOOL)
        if r["data_source"] == "arith_sequence"
    }
    train = {
        mathematics(r)
        for r in algebra.rows("train", 2000, 1, SCHOOL)
        if r["data_source"] == "arith_sequence"
    }
    assert not test & train


def test_about_a_fifth_of_all_problems_are_test_problems():
    assert (
        0.18 < sum(is_test(f"problem {i}", "algebra test side") for i in range(5000)) / 5000 < 0.22
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_no_question_occurs_twice_in_a_split(level, split):
    questions = [question(r) for r in algebra.rows(split, 96, 0, level)]
    assert len(set(questions)) == len(questions)


def test_a_longer_data_set_begins_with_the_shorter_one():
    assert algebra.rows("train", 64, 3, EASY)[:24] == algebra.rows("train", 24, 3, EASY)


def test_another_seed_gives_other_problems():
    assert algebra.rows("train", 16, 0, SCHOOL) != algebra.rows("train", 16, 1, SCHOOL)


def test_uids_are_unique_and_say_where_a_problem_comes_from():
    uids = [r["extra_info"]["uid"] for r in algebra.rows("test", 20, 0, EASY)]
    assert uids == [f"algebra/easy/test/{n}" for n in range(20)]


def test_an_exhausted_template_loses_its_turns():
    rows = algebra.rows("test", 8000, 0, EASY)
    assert (
        rows[:100] == algebra.rows("test", 100, 0, EASY)
        and len({question(row) for row in rows}) == len(rows) < 8000
    )
    counts = Counter(row["data_source"] for row in rows)
    assert len(counts) == 8 and max(counts.values()) > 2 * min(counts.values())


@pytest.mark.parametrize(("split", "level"), [("valid", EASY), ("train", 3)])
def test_an_unknown_split_or_level_is_a_users_error(split, level):
    with pytest.raises(UserError):
        algebra.rows(split, 8, 0, level)


# ---------------------------------------------------------------- the warm start


def replies(careless):
    return [row["messages"][1]["content"] for row in warm_start(800, 0, EASY, careless)]


def test_careless_replies_have_no_working_and_their_share():
    without_working = sum("\n" not in reply for reply in replies(0.4))
    assert 0.35 < without_working / 800 < 0.45
    assert all("\n" in reply for reply in replies(0.0))
    assert not any("\n" in reply for reply in replies(1.0))


def test_careless_guesses_are_mostly_wrong():
    careful, careless = replies(0.0), replies(1.0)
    right = sum(a.split("\n")[-1] == b for a, b in zip(careful, careless, strict=True))
    assert right / 800 < 0.25


# ---------------------------------------------------------------- files


def test_the_committed_files_are_what_the_generator_writes(tmp_path):
    for split, count in (("train", 192), ("test", 64)):
        write_rows(tmp_path / f"{split}.jsonl", algebra.rows(split, count, 0, SCHOOL))
        written = (tmp_path / f"{split}.jsonl").read_bytes()
        assert written == (COMMITTED / f"{split}.jsonl").read_bytes()
