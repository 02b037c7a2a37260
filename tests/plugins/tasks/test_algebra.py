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
from tandem.plugins.tasks.algebra import SCHOOL_FORMAT, warm_start
from tandem.runtime.disk import write_rows

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
    return algebra.rows("train", 64, 7, request.param) + algebra.rows("test", 32, 7, request.param)


def test_an_independent_solver_finds_every_label_in_the_text(rows):
    for row in rows:
        solved = SOLVERS[row["data_source"]](question(row))
        assert sympy.Rational(row["reward_model"]["ground_truth"]) == solved, row


# ---------------------------------------------------------------- worked solutions


def unknowns(row):
    """The values under which every line of the working must hold."""
    text = question(row)
    match row["data_source"]:
        case "system_combo":
            (solution,) = sympy.linsolve(equations(text), X, Y)
            return dict(zip((X, Y), solution, strict=True))
        case "poly_remainder":
            divisor = re.search(r"x [-+] \d+(?=[.?]$)|(?<=/\()x-\d+", text)[0]
            (zero,) = sympy.solve(expression(divisor), X)
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
                assert expression(line) == sympy.Rational(row["reward_model"]["ground_truth"]), row
    assert sum(checked.values()) > len(rows) / 2


def test_every_worked_solution_ends_in_the_right_answer_line(rows):
    for row in rows:
        last = row["extra_info"]["solution"].split("\n")[-1]
        assert last == f"Answer: {row['reward_model']['ground_truth']}"


# ---------------------------------------------------------------- the two sides and the seeds


@pytest.mark.parametrize("level", LEVELS)
def test_the_warm_start_never_meets_test(level):
    test = {question(r) for seed in range(3) for r in algebra.rows("test", 64, seed, level)}
    warm = {
        row["messages"][0]["content"].removesuffix("\n" + SCHOOL_FORMAT)
        for row in warm_start(512, 5, level, 0.5)
    }
    assert not test & warm


def test_the_side_of_a_problem_does_not_depend_on_its_wording():
    def mathematics(*place):
        rows = [r for r in algebra.rows(*place, SCHOOL) if r["data_source"] == "arith_sequence"]
        return {re.sub(r"\D*?(-?\d+)", r"\1 ", question(row)) for row in rows}

    test, train = mathematics("test", 128, 0), mathematics("train", 2000, 1)
    assert test and train and not test & train


# ---------------------------------------------------------------- the warm start


def replies(careless):
    return [row["messages"][1]["content"] for row in warm_start(800, 0, EASY, careless)]


def test_careless_replies_have_no_working_and_their_share():
    without_working = sum("\n" not in reply for reply in replies(0.4))
    assert 0.35 < without_working / 800 < 0.45
    assert all("\n" in reply for reply in replies(0.0))
    assert not any("\n" in reply for reply in replies(1.0))


# ---------------------------------------------------------------- files


def test_the_committed_files_are_what_the_generator_writes(tmp_path):
    for split, count in (("train", 192), ("test", 64)):
        write_rows(tmp_path / f"{split}.jsonl", algebra.rows(split, count, 0, SCHOOL))
        written = (tmp_path / f"{split}.jsonl").read_bytes()
        assert written == (COMMITTED / f"{split}.jsonl").read_bytes()
