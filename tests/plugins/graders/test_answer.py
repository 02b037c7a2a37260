r"""The `answer` verifier: which answer is taken from a completion, and which answers are the
same."""

import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.plugins.graders.answer import extract, score
from tandem.plugins.graders.answer_compare import equal
from tandem.plugins.graders.answer_numbers import parse_number

FINAL = {
    "Answer: 7": "7",
    "3 + 4 = 7. Answer: 7": "7",
    "first Answer: 3\nno, Answer: 7\nbye 9": "7",
    "**Answer:** $7$.": "7",
    "**Answer: 7**": "7",
    "ANSWER : 7.": "7",
    "### Final answer:\n\n  `7`\nthat was easy": "7",
    "The answer is: \\(7\\)": "7",
    "Answer: \\[ 7 \\]": "7",
    "Answer: $\\boxed{7}$, as 3 + 4 = 7": "7",
    "Answer: \\$7.00": "7",
    "so \\boxed{3} or rather \\boxed{7}": "7",
    "\\boxed{\\frac{1}{2}} is 0.5": "1/2",
    "\\boxed{ \\boxed{7} }": "7",
    "\\boxed{7} and then \\boxed{8": "7",
    "\\boxed{9} but Answer: 7": "7",
    "\\boxed{7}\nAnswer:": "7",
}


@pytest.mark.parametrize("text", FINAL)
def test_the_final_answer_is_taken(text):
    assert score(text, FINAL[text]) == 1.0


def test_the_word_answer_may_follow_the_name_of_a_channel_or_a_small_letter():
    for mark in ("finalAnswer", "FinalAnswer", "FINALANSWER", "assistantfinalAnswer", "myAnswer"):
        assert extract(f"3+4. {mark}: 7") == " 7"


@pytest.mark.parametrize(
    "text",
    [
        *("7", "the result is 7.", "3 + 4 = 7", "Answer 7", "", "Answer:", "boxed{7}"),
        *("\\boxed{7", "reanswer: 7"),
    ],
)
def test_a_number_in_the_prose_is_never_an_answer(text):
    assert extract(text) is None
    assert score(text, "7") == 0.0


def test_the_last_answer_counts_even_if_an_earlier_one_is_right():
    assert score("Answer: 7\nAnswer: 8", "7") == 0.0
    assert score("\\boxed{7} \\boxed{8}", "7") == 0.0
    assert score("Answer: 8 \\boxed{7", "7") == 0.0
    assert score("\\boxed{7} Answer: 8", "7") == 0.0


PAIRS = tomllib.loads((Path(__file__).parent / "answer_pairs.toml").read_text())
BOTH_WAYS = {"same": True, "different": False}


@pytest.mark.parametrize("kind", ["formulas", "meanings", "conditions", "small", "computed"])
def test_answers_are_equal_where_they_mean_the_same(kind):
    assert [pair for pair in PAIRS[kind] if equal(*pair[:2]) is not pair[2]] == []


@pytest.mark.parametrize("kind", BOTH_WAYS)
def test_spellings_of_numbers_and_texts_are_compared_alike_both_ways(kind):
    pairs = [pair[::by] for pair in PAIRS[kind] for by in (1, -1)]
    assert [pair for pair in pairs if equal(*pair) is not BOTH_WAYS[kind]] == []


@pytest.mark.parametrize(
    ("kind", "before"), [("words", "Answer: "), ("guesses", "Answer: "), ("completions", "")]
)
def test_what_stands_around_an_answer_counts(kind, before):
    assert [pair for pair in PAIRS[kind] if score(before + pair[0], pair[1]) != pair[2]] == []


def test_math_verify_also_decides_outside_the_main_thread():
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(equal, "2\\sqrt{3}", "\\sqrt{12}").result()


def test_words_and_unevaluated_numbers_never_reach_math_verify():
    program = (
        "import sys; from tandem.plugins.graders.answer import equal\n"
        "print(equal('seat', 'east'), equal('the number 5', r'\\sqrt{25}'), equal('2+3', '5'), equal('x^2', 'x^2'))\n"
        "print('math_verify' in sys.modules, equal('1+x', 'x+1'), 'math_verify' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False", "False", "True", "False", "True", "True"]


def test_large_formulas_are_told_apart_without_their_digits():
    equal("1+x", "x+1")  # imports Math-Verify
    for guess in (
        "2^{10^{9}}",
        "1000000!",
        r"\sqrt{2}^{10^9}",
        "(x+y+z)^{500}",
        r"\frac{1}{10^9!}",
    ):
        start = time.thread_time()
        assert not equal(guess, r"\sqrt{2}")
        # processor seconds; minutes to write any of them out
        assert time.thread_time() - start < 2.0


GRADED = tomllib.loads((Path(__file__).parent / "graded_answers.toml").read_text())["pair"]
NOT_READ = {
    r"(-\infty,0)\cup(0,\infty)",
    r"\text{does not exist}",
}  # and an identity matrix in words


def test_300_graded_pairs_none_wrong_is_paid_three_right_refused():
    assert [
        pair for pair in GRADED if score(pair["completion"], pair["truth"]) and not pair["right"]
    ] == []
    refused = [
        pair["truth"]
        for pair in GRADED
        if pair["right"] and not score(pair["completion"], pair["truth"])
    ]
    assert (len(GRADED), len(refused)) == (300, 3)
    assert len([truth for truth in refused if truth in NOT_READ]) == 2


HUGE = [
    "9**9**9",
    "9^9^9^9",
    "1" * 250,
    "1e" + "9" * 200,
    "1e999999999",
    "9" * 10**7,
    "\\frac{1}{" * 60,
    "1," * 120,
]


@pytest.mark.parametrize("guess", HUGE, ids=lambda guess: guess[:12])
def test_a_hostile_number_is_wrong_at_once(guess):
    start = time.thread_time()
    assert score(f"Answer: {guess}", "5") == 0.0
    assert score(f"\\boxed{{{guess}}}", "5") == 0.0
    assert score(f"Answer: 5 {guess}", "-1/2") == 0.0
    # processor seconds; evaluating any of them takes minutes or all memory
    assert time.thread_time() - start < 5.0


PIECES = ["\\boxed{", "Answer:", "answer" + " " * 50, "\\boxed", "{", "1,", "\\frac", " ", "5 "]


@pytest.mark.parametrize("piece", PIECES)
def test_no_text_makes_the_search_slow(piece):
    start = time.thread_time()
    score(piece * (10**6 // len(piece)), "5")
    parse_number((piece * 256)[:256])
    assert time.thread_time() - start < 5.0  # processor seconds; where it is quadratic, minutes


integers = st.integers(-(10**12), 10**12)
positive = st.integers(1, 10**6)


@st.composite
def numbers(draw):
    """(text, value): a number in one of the accepted spellings."""
    whole, top, below = draw(integers), draw(st.integers(0, 10**6)), draw(positive)
    sign = draw(st.sampled_from(["", "-"]))
    places = draw(st.integers(1, 8))
    signed = -1 if sign else 1
    return draw(
        st.sampled_from(
            [
                (f"{whole}", Fraction(whole)),
                (f"{whole:,}", Fraction(whole)),
                (f"{whole}.0", Fraction(whole)),
                (f"{sign}{top}/{below}", Fraction(signed * top, below)),
                (f"{sign}\\frac{{{top}}}{{{below}}}", Fraction(signed * top, below)),
                (f"\\dfrac{{{top}}}{{{sign}{below}}}", Fraction(signed * top, below)),
                (f"{sign}{below} {top}/{below}", signed * (below + Fraction(top, below))),
                (
                    f"{sign}{below}\\frac{{{top}}}{{{below}}}",
                    signed * (below + Fraction(top, below)),
                ),
                (f"{sign}{below}.{top:0{places}d}", signed * Fraction(f"{below}.{top:0{places}d}")),
                (f"{sign}{top}e-{places}", signed * Fraction(top, 10**places)),
                (f"x = {whole}", Fraction(whole)),
                (f"${whole}$.", Fraction(whole)),
            ]
        )
    )


@settings(max_examples=200, deadline=None)
@given(numbers(), numbers())
def test_two_numbers_are_equal_exactly_when_their_fractions_are(one, other):
    assert parse_number(one[0]).value == one[1]
    assert equal(one[0], other[0]) == (one[1] == other[1])


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("0123456789+-*/=.,%$\\{}() xfrac\n") | st.characters(), max_size=60))
def test_no_text_raises(text):
    extract(text)
    parse_number(text)
    assert score(f"Answer: {text}", "5") in (0.0, 1.0)
