r"""The comparison of two answers: as text, as a choice, as numbers, or as formulas; lists, sets and
tuples member by member.

Numbers are compared exactly as fractions, with their units, and nothing is evaluated: when the
truth is a number, `2+3` is not 5, because paying for arithmetic left undone pays for repeating the
question. Only formulas are left to Math-Verify (sympy), which a pool imports early.

Knows no completions.

    python -c "from tandem.plugins.graders.answer_compare import equal; \
        print(equal('x = 3 or x = -5', r'\{-5, 3\}'))"
"""

import logging
import re
from typing import Any

from tandem.plugins.graders.answer_numbers import (
    NUMBER_CHARS,
    parse_based,
    parse_number,
    parse_unit,
    same_number,
    split_name,
)
from tandem.plugins.graders.answer_spelling import normal, without_fonts

DIGITS = 600  # to which formulas are computed
MEMBERS = 32  # of a list; more are compared as one string

_DOUBT = (
    r"(?:or|not|no|maybe|mod|actually|wrong|incorrect|correct|right|but|instead|rather|except"
    r"|unless|approx\w*|about|times)"
)
_REMARK = re.compile(
    rf"(?<=\S)\s+(?:\\text\{{)?\((?![^()]*\b{_DOUBT}\b)[^()]*[A-Za-z]{{3}}[^()]*\)\}}?"
    r"[\s$.*]*$",
    re.IGNORECASE,
)
_LEAD = re.compile(
    r"(?!no\b|not\b|none\b|never\b|nothing\b)[A-Za-z][A-Za-z' $-]{0,60}"
    r" (?:is|are|equals|be)(?: equal to| at| in)?:?"
    r"(?: (?:a|an|the)(?: line| set| point)?)?(?: (?!not\b)|(?=[(\\]))"
    r"|(?:all )?real (?:numbers )?(?=[a-z])",
    re.IGNORECASE,
)
_ANOTHER_CHOICE = re.compile(r"^(?:or|and|,|/)|\([A-J]\)|\b[B-H](?![a-z'])\b|\bA\b(?! [a-z])")
_CHOICE = re.compile(
    r"(?:the )?(?:(?:correct )?(?:option|choice|answer)(?: is)?:? ?)?"
    r"(?:\(([A-Ja-j])\)|([A-J])(?=[).:]|$))[).:]* ?(.*)"
)
_VERDICTS = {"yes", "no", "true", "false"}


def equal(found: str, truth: str) -> bool:
    """Compare two answers."""
    if not _REMARK.search(truth):
        found = _REMARK.sub("", found)
    one, other = normal(found), normal(truth)
    if not one or not other:
        return False
    if _key(one) == _key(other):
        return True
    if max(len(one), len(other)) > NUMBER_CHARS:
        return False
    if (verdict := _key(other)) in _VERDICTS:  # or the beginning of a text, "yes, because ..."
        words = re.findall(r"[a-z]+", stated := _key(one))
        alone = words[:1] == [verdict] and _VERDICTS.isdisjoint(words[1:])
        return alone and stated[len(verdict)] in ",;:."
    if _CHOICE.fullmatch(without_fonts(other)):
        return _same_choice(without_fonts(one).strip(" ."), without_fonts(other))
    return _same(_LEAD.sub("", one, count=1), other)


def _key(text: str) -> str:
    """Return the form to compare as a string: words in any case and without their article, a choice
    without its parentheses."""
    text = re.sub(r" ?([,;]) ?", r"\1", without_fonts(text)).strip(" .")
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text)
    if re.search(r"[0-9\\]", text):
        return text
    return re.sub(r"^(?:an?|the) (?=..)", "", text.casefold())


def _same_choice(one: str, other: str) -> bool:
    """Compare two choices by their letters; a choice's text counts if the other names no letter."""
    guess = _CHOICE.fullmatch(one) or _CHOICE.fullmatch(_LEAD.sub("", one, count=1))
    truth = _CHOICE.fullmatch(other)
    assert truth is not None
    if guess is None:
        return bool(truth[3]) and _same(one, normal(truth[3]))
    same = (guess[1] or guess[2]).upper() == (truth[1] or truth[2]).upper()
    return same and _ANOTHER_CHOICE.search(guess[3]) is None


# ---------------------------------------------------------------- lists, sets, tuples, matrices


def _same(one: str, other: str) -> bool:
    # "for any constant c" and its like are cut off: off the truth if the other says nothing of the
    # kind, off both if they are the same or exclude nothing
    (plain, own), (true, condition) = _split_condition(one), _split_condition(other)
    if own in ("", condition) or (_FREE.fullmatch(own) and _FREE.fullmatch(condition)):
        one, other = plain, true
    ones, others = _members(one), _members(other)
    if len(ones) > 1 and len(others) == 1:
        named = sorted(split_name(item) for item in ones)
        names = {name for name, _ in named}
        if "" not in names and len(names) == len(ones):  # a point, as x=3 and y=-1
            ones = [f"({','.join(value for _, value in named)})"]
    if max(len(ones), len(others)) > 1:
        return len(ones) == len(others) and _matched(ones, others)
    one, other = ones[0], others[0]
    guess, truth = _bracketed(split_name(one)[1]), _bracketed(split_name(other)[1])
    if guess is None or truth is None:
        comparable = guess is truth is None or ("matrix" in one and "matrix" in other)
        return _key(one) == _key(other) or (comparable and _same_value(one, other))
    (brackets, ones), (true_brackets, others) = guess, truth
    return (brackets, len(ones)) == (true_brackets, len(others)) and all(
        _same(a, b) for a, b in zip(ones, others, strict=True)
    )


def _matched(ones: list[str], others: list[str]) -> bool:
    """Pair each of ones with another of others, in any order; False if one has no partner."""
    left = list(others)
    for one in ones:
        partner = next((other for other in left if _same(one, other)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


_SEPARATOR = (
    r"[,;]|\\(?:cup|lor|vee)(?![A-Za-z])|\\text\{ ?,? ?(?:and|or) ?\}"
    r"|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
)
_TOKEN = re.compile(rf"\\(?:begin|end)\{{[a-z]+\*?\}}|\\[{{}}]|[(){{}}\[\]]|{_SEPARATOR}")
_THOUSANDS = re.compile(r"[0-9],[0-9]{3}(?![0-9])")
_DOLLARS = re.compile(r"\$ *(,|;|and|or|, and|, or) *\$")
_ELEMENT = re.compile(r"[A-Za-z] ?\\in(?![A-Za-z]) ?(.+)|[A-Za-z]=(\\\{.+\\\})")
_BRACES = re.compile(r"\\\{(.*)\\\}|\{(.*,.*)\}")


def _members(text: str) -> list[str]:
    r"""List the members of a set, of a list without brackets, of a union; else the text alone.

    "\pm" makes two members. A name before "\in" or before the equals sign of a set is left out.
    """
    text = _DOLLARS.sub(r" \1 ", text).strip()
    element = _ELEMENT.fullmatch(text)
    text = (element[1] or element[2]) if element else text
    if parse_number(text) is not None:  # "1,234"
        return [text]
    braces = _BRACES.fullmatch(text)
    if braces and len(_split(text)) == 1:
        text = (braces[1] or braces[2] or "").strip()
    items = list[str]()
    for item in _split(text):
        signs = [normal(item.replace(r"\pm", sign)).removeprefix("+") for sign in "+-"]
        items += signs if item.count(r"\pm") == 1 else [item]
    return items if items and len(items) <= MEMBERS else [text]


def _split(text: str) -> list[str]:
    """Split a text at the separators outside of brackets; not at all if brackets do not close."""
    items, depth, start = list[str](), 0, 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in (r"\{", "(", "[", "{") or token.startswith(r"\begin"):
            depth += 1
        elif token in (r"\}", ")", "]", "}") or token.startswith(r"\end"):
            depth -= 1
        elif depth == 0 and not (match.start() and _THOUSANDS.match(text, match.start() - 1)):
            items.append(text[start : match.start()].strip())
            start = match.end()
    items.append(text[start:].strip())
    return [item for item in items if item] if depth == 0 else [text]


def _bracketed(text: str) -> tuple[str, list[str]] | None:
    """Split a tuple, interval or matrix, "[1,2)" into "[)" and ["1", "2"]; None: it is none."""
    text = _as_rows(_as_interval(text))
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    items = _split(text[1:-1])
    return (text[0] + text[-1], items) if len(items) > 1 or text.startswith("[[") else None


_SIDE = r"([^<>=]+?)"
_ONE_SIDED = re.compile(rf"([a-zA-Z])(<|>|\\le |\\ge ){_SIDE}|{_SIDE}(<|>|\\le |\\ge )([a-zA-Z])")
_TWO_SIDED = re.compile(
    rf"{_SIDE}(<|\\le )[a-zA-Z](<|\\le ){_SIDE}|{_SIDE}(>|\\ge )[a-zA-Z](>|\\ge ){_SIDE}"
)


def _as_interval(text: str) -> str:
    r"""Write an inequality of one variable as its interval, "1<x\le 2" as "(1,2]"; any other text
    unchanged."""
    text = re.sub(r"\s*(\\[lg]e)(?![A-Za-z])\s*", r"\1 ", text)
    if match := _TWO_SIDED.fullmatch(text):
        low, left, right, high = match.groups()[:4] if match[1] else match.groups()[:3:-1]
    elif match := _ONE_SIDED.fullmatch(text):
        sign, side = (match[2], match[3]) if match[1] else (match[5], match[4])
        above = ("<" in sign or "le" in sign) == bool(match[1])  # the side is the upper end
        ends = (r"-\infty", "<", sign, side) if above else (side, sign, "<", r"\infty")
        low, left, right, high = ends
    else:
        return text
    opening, closing = "[" if "e" in left else "(", "]" if "e" in right else ")"
    return f"{opening}{low.strip()},{high.strip()}{closing}"


_MATRIX = re.compile(
    r"[(\[]?\\begin\{(?:[pbB]?matrix|smallmatrix|array)\}(?:\{[lcr|]+\})?(.*?)\\end\{\w+\}[)\]]?"
)


def _as_rows(text: str) -> str:
    r"""Write a matrix as its rows, "[[1,2],[3,4]]", a column as "[1,2]"; any other text
    unchanged."""
    match = _MATRIX.fullmatch(text)
    if match is None:
        return text
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[1]) if row.strip()]
    cells = [",".join(cell.strip() for cell in row.split("&")) for row in rows]
    cells = [f"[{row}]" for row in cells] if "&" in match[1] else cells
    return f"[{','.join(cells)}]"


# ---------------------------------------------------------------- conditions

_CONDITION = re.compile(
    r"(?<=[^\s,;])[\s,;]*\(?(?:(?:for|where|with|if|when|whenever|provided)\b|\\forall\b"
    r"|(?<=[\s,;(])[A-Za-z](?:, ?[A-Za-z])* ?\\in ?\\math)"
    # a value, another case, the next member of a list
    r"(?!.*(?:=|\b(?:for|if|when|otherwise|else|or|then|but|not|remainder|even|odd|prime)\b"
    r"|(?:[,;&]|\band\b)[^A-Za-z]*[0-9\\]))"
    r".*(?<![A-Za-z\\])[A-Za-z](?![A-Za-z]).*"
)
_FREE = re.compile(
    r"(?:[\s,;()]|\\forall|\b(?:for|where|with|all|any|every|each|is|are|an|the|be|real|arbitrary"
    r"|constants?|numbers?|values?|of|and|[A-Za-z])\b)*"
)


def _split_condition(text: str) -> tuple[str, str]:
    plain = without_fonts(text, r" \1 ")
    match = _CONDITION.search(plain)
    if match is None or not _is_math(plain[: match.start()]):
        return text, ""
    return normal(plain[: match.start()]), _key(match[0])


# ---------------------------------------------------------------- numbers and formulas


def _same_value(one: str, other: str) -> bool:
    based, truth_based = parse_based(one), parse_based(other)
    if based and truth_based and (based[1] or truth_based[1]):
        return based[0] == truth_based[0] and (
            based[1] == truth_based[1] or 0 in (based[1], truth_based[1])
        )
    number = parse_number(other)
    if number is not None:
        guess = parse_number(one)
        return guess is not None and same_number(guess, number)
    (name, value), (truth_name, truth) = split_name(one), split_name(other)
    if name == truth_name or "=" not in one or "=" not in other:
        one, other = value, truth
    (one, unit), (other, truth_unit) = _without_unit(one), _without_unit(other)
    if unit and truth_unit and unit != truth_unit:
        return False
    return _key(one) == _key(other) or (
        _is_math(one) and _is_math(other) and _math_verify(one, other)
    )


_MEASURED = re.compile(r"(.*[0-9)}a-z°!]) ([A-Za-z/^0-9 ]+)")


def _without_unit(formula: str) -> tuple[str, str]:
    r"""Split a formula from its unit: "2\pi" and "cm" of "2\pi\text{ cm}"; no unit is ""."""
    match = _MEASURED.fullmatch(re.sub(" +", " ", without_fonts(formula, r" \1 ")).strip())
    unit = parse_unit(match[2]) if match and "=" not in formula else None
    return (match[1], unit) if match and unit and not unit.isdigit() else (formula, "")


_COMMANDS = r"\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+"
_FUNCTIONS = re.compile(
    _COMMANDS + r"|arc|sinh?|cosh?|tanh?|cot|sec|csc|log|ln|exp|sqrt|pi|gcd|lcm|min|max"
)


def _is_math(text: str) -> bool:
    r"""Tell whether Math-Verify may see a text.

    It multiplies letters, so that "seat" equals "east", and picks a number out of prose. So words,
    unbalanced braces and inner dollar signs (two formulas, two guesses) never reach it.
    """
    letters = _FUNCTIONS.sub(" ", text)
    opened, closed = (len(re.findall(rf"(?<!\\)\{brace}", text)) for brace in "{}")
    wordless = not re.search(r"[A-Za-z]{3}", letters) and bool(re.search(r"[0-9\\^*/+=-]", text))
    return wordless and opened == closed and "$" not in text


def _math_verify(found: str, truth: str) -> bool:
    """Ask Math-Verify, without its alarms: they need the main thread, and cannot stop C."""
    import math_verify
    from sympy import Expr

    # it warns at each process that its alarms are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    config = [math_verify.LatexExtractionConfig()]
    parsed = [
        math_verify.parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=None)
        for text in (_DECIMAL.sub(_exact, truth), _DECIMAL.sub(_exact, found))
    ]
    if not all(parsed) or _seen_to_differ(parsed[1][0], parsed[0][0]):  # it forgives 1e-15
        return False
    digits = 15 if isinstance(parsed[0][0], Expr) else DIGITS  # of an equation, a matrix
    return bool(math_verify.verify(*parsed, 12, digits, timeout_seconds=None))


_DECIMAL = re.compile(r"(?<![\d.,])(?<!\d[({ ])(\d*)\.(\d+)(?![\d.,])")


def _exact(decimal: re.Match[str]) -> str:
    return rf"{{\frac{{{decimal[1]}{decimal[2]}}}{{1{'0' * len(decimal[2])}}}}}"


def _seen_to_differ(found: Any, truth: Any) -> bool:
    """Tell whether two formulas have different values, each letter being some number below 1."""
    from sympy import Derivative, Float, Integral, Limit, Product, Rational, Sum

    try:
        difference = found - truth  # which writes out powers in truth, not those in found
        if difference.has(Derivative, Float, Integral, Limit, Product, Sum):
            return False
        values = {x: Rational(1, sum(map(ord, x.name))) for x in difference.free_symbols}
        parts = difference.evalf(100, values, maxn=DIGITS).as_real_imag()
    except Exception:  # formulas of all kinds, by functions of all kinds
        return False
    # a precision of 1 bit: nothing but rounding
    return any(isinstance(part, Float) and part._prec > 1 for part in parts)
