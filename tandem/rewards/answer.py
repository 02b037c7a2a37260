r"""The `answer` verifier: is the completion's final answer the ground truth? 1.0 or 0.0.

The final answer is what follows the last `Answer:`, else the content of the last `\boxed{...}`; a number that merely
stands in the prose is never taken. Numbers are compared exactly as fractions and nothing is evaluated: when the truth
is a number, `2+3` is not 5, because paying for arithmetic left undone pays for repeating the question. Only when the
truth is not a number does Math-Verify (sympy) decide, imported at the first such answer.

It knows neither problems nor processes, and Math-Verify can run forever inside one C call: score untrusted text
through RewardPool, whose clock is outside.

    python -c "from tandem.rewards.answer import score; print(score('so 3/6. Answer: 0.5', '1/2'))"
"""

import re
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

TEXT_CHARS = 2_000  # the final answer is near the end; a longer tail only costs time
ANSWER_CHARS = 256  # longer is not an answer, and this bounds the digits of every number below

Loading = Callable[[bool], None]


def ignore_loading(_: bool) -> None:
    pass


def score(text: str, answer: str, loading: Loading = ignore_loading) -> float:
    """1.0 if the final answer of text equals answer, else 0.0.

    loading(True) is called before Math-Verify is imported (0.5 s once, more on a cold disk) and loading(False) after,
    so that a caller who holds a clock can allow for it.
    """
    found = extract(text)
    return float(found is not None and equal(found, answer, loading))


# ---------------------------------------------------------------- the final answer of a completion

_ANSWER = re.compile(r"(?<![a-z])answer(?:[ \t]+is)?[ \t*_`]*[:：]", re.IGNORECASE)
_MARKUP = " \t\r\n*_`"


def extract(text: str) -> str | None:
    """The final answer as written, e.g. "**Answer:** $5$." gives "$5$."; None where there is none."""
    text = text[-TEXT_CHARS:]
    matches = list(_ANSWER.finditer(text))
    if matches:
        lines = [line for line in text[matches[-1].end() :].splitlines() if line.strip(_MARKUP)]
        if lines:
            return _last_boxed(lines[0]) or lines[0]
    return _last_boxed(text)


def _last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...}; a cut one at the very end does not hide the one before."""
    for match in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        end = _closing_brace(text, match.end())
        if end is not None:
            return text[match.end() : end]
    return None


def _closing_brace(text: str, start: int) -> int | None:
    r"""Where the brace opened just before start closes; \{ and \} are characters, not braces."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None


# ---------------------------------------------------------------- one way of writing

_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"[−–]", "-"),
        (r"(?<!\\)\\[()\[\]!,]|\\(?:left|right|displaystyle)(?![A-Za-z])", ""),
        (r"(?<!\\)\\[;: ]|~|\\quad(?![A-Za-z])|\s+", " "),
        (r"\{,\}", ","),
        (r"\\\$", ""),
        (r"\\%", "%"),
        (r"\^\{?\\circ\}?(?![A-Za-z])", "°"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac ?(\d) ?(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac ?(\d) ?\{", r"\\frac{\1}{"),
        (r"\\frac ?(\{[^{}]*\}) ?(\d)", r"\\frac\1{\2}"),
        (r" ?([-+/={}()^%°]) ?", r"\1"),  # never between digits: "1 1/2" is not 11/2
    ]
]
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_NOT_NUMBERS = {"nan", "inf", "infinity"}


def _normal(text: str) -> str:
    """One spelling for the same answer; empty where it cannot be one."""
    if len(text) > ANSWER_CHARS:
        return ""
    text = text.strip(_MARKUP + "$").rstrip(".。").strip(_MARKUP + "$")
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip()
    return "" if text.lstrip("+-").casefold() in _NOT_NUMBERS else text


def _string_key(normal: str) -> str:
    """What is compared as a string: words in any case, a choice with or without its parentheses."""
    text = re.sub(r" ?([,;]) ?", r"\1", _WRAPPED.sub(r"\1", normal)).strip()
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text)
    return text if re.search(r"[0-9\\]", text) else text.casefold()


# ---------------------------------------------------------------- numbers


class Number(NamedTuple):
    r"""A number as written, e.g. "x = -\frac{1}{2}\text{ cm}" is Number(Fraction(-1, 2), False, "x", "cm")."""

    value: Fraction
    percent: bool
    name: str
    unit: str


_UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
_PLAIN = re.compile(rf"([+-]?{_UNSIGNED})")
_SLASH = re.compile(rf"([+-]?{_UNSIGNED})/([+-]?{_UNSIGNED})")
_FRAC = re.compile(rf"([+-]?)\\frac\{{([+-]?{_UNSIGNED})\}}\{{([+-]?{_UNSIGNED})\}}")
_MIXED = re.compile(r"([+-]?)([0-9]+) ?(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|(?<= )([0-9]+)/([0-9]+))")
_NAMED = re.compile(r"([A-Za-z](?:_?\{?[A-Za-z0-9]{1,8}\}?)?)=(.+)")
_UNIT = re.compile(r"(.*?[0-9.}%]) ?(?:\\(?:text|mathrm|mbox)\{([^{}0-9]*)\}(?:\^\{?[23]\}?)?|(°))")


def parse_number(text: str) -> Number | None:
    r"""The number text writes, None if it writes anything else. Nothing is evaluated; 256 digits are the most.

    Integers, decimals, `1,000`, `1e-5`, `a/b`, `\frac{a}{b}`, `1\frac{1}{2}`, with a sign, `%`, `x =`, and a unit
    in `\text{...}` or degrees.
    """
    text = _normal(text)
    named = _NAMED.fullmatch(text)
    name, text = (named[1], named[2]) if named else ("", text)
    measured = _UNIT.fullmatch(text)
    text, unit = (measured[1], (measured[2] or measured[3]).strip()) if measured else (text, "")
    percent = text.endswith("%")
    value = _fraction(text.removesuffix("%"))
    return None if value is None else Number(value, percent, name, unit)


_IN_PROSE = re.compile(rf"(?<![\w.,/])[+-]?{_UNSIGNED}(?:/{_UNSIGNED})?%?")


def written_numbers(text: str) -> list[str]:
    """The numbers that stand in the end of the text, for parse_number: "2 cats and -3.5 dogs." has "2" and "-3.5"."""
    return _IN_PROSE.findall(re.sub(r"[−–]", "-", text[-TEXT_CHARS:]))


def _fraction(text: str) -> Fraction | None:
    if match := _PLAIN.fullmatch(text):
        return _decimal(match[1])
    if match := _SLASH.fullmatch(text):
        return _ratio("", match[1], match[2])
    if match := _FRAC.fullmatch(text):
        return _ratio(match[1], match[2], match[3])
    if match := _MIXED.fullmatch(text):
        part = _ratio("", match[3] or match[5], match[4] or match[6])
        return None if part is None else (Fraction(match[2]) + part) * (-1 if match[1] == "-" else 1)
    return None


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _ratio(sign: str, above: str, below: str) -> Fraction | None:
    denominator = _decimal(below)
    return (-1 if sign == "-" else 1) * _decimal(above) / denominator if denominator else None


def _same_number(one: Number, other: Number) -> bool:
    """Equal values; a name or a unit may be left out, but two different ones are two different answers."""
    names = one.name == other.name or not one.name or not other.name
    units = one.unit == other.unit or not one.unit or not other.unit
    return one.value == other.value and one.percent == other.percent and names and units


# ---------------------------------------------------------------- the comparison


def equal(found: str, truth: str, loading: Loading = ignore_loading) -> bool:
    """Whether two answers are the same: as strings, else as numbers, else (truth not a number) for Math-Verify."""
    one, other = _normal(found), _normal(truth)
    if not one or not other:
        return False
    if _string_key(one) == _string_key(other):
        return True
    number = parse_number(other)
    if number is not None:
        guess = parse_number(one)
        return guess is not None and _same_number(guess, number)
    return _is_math(one) and _is_math(other) and _math_verify(one, other, loading)


_COMMANDS = r"\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+"
_FUNCTIONS = re.compile(_COMMANDS + r"|arc|sinh?|cosh?|tanh?|cot|sec|csc|log|ln|exp|sqrt|pi|gcd|lcm|min|max")


def _is_math(text: str) -> bool:
    r"""Whether Math-Verify may see it. It multiplies letters, so that "seat" equals "east", and it picks a number out
    of prose; words, unbalanced braces and inner dollar signs (two formulas, two guesses) never reach it.
    """
    letters = _FUNCTIONS.sub(" ", text)
    opened, closed = (len(re.findall(rf"(?<!\\)\{brace}", text)) for brace in "{}")
    wordless = not re.search(r"[A-Za-z]{3}", letters) and bool(re.search(r"[0-9\\^*/+=-]", text))
    return wordless and opened == closed and "$" not in text


def _math_verify(found: str, truth: str, loading: Loading) -> bool:
    """Math-Verify's verdict, with its own alarms off: they need the main thread and cannot stop a C call."""
    first = "math_verify" not in sys.modules
    if first:
        loading(True)
    import logging

    import math_verify

    if first:
        loading(False)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each process that its alarms are off
    config = [math_verify.LatexExtractionConfig()]
    parsed = [
        math_verify.parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=None)
        for text in (truth, found)
    ]
    return all(parsed) and bool(math_verify.verify(*parsed, timeout_seconds=None))
