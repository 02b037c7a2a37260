r"""One spelling for each answer: LaTeX, Unicode and plain text written alike, so that answers can
be compared as text.

Computes nothing, and knows neither numbers nor completions.

    python -c "from tandem.rewards.answer_spelling import normal; \
        print(normal(r'$\left( \tfrac12,\; x \right)$.'))"
"""

import re

MARKUP = " \t\r\n*_`"
_CHARACTERS = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "∞": r"\infty ",
        "π": r"\pi ",
        "θ": r"\theta ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "±": r"\pm ",
        "½": r"\frac12",
        "¼": r"\frac14",
        "¾": r"\frac34",
        "。": ".",
        "∅": r"\emptyset ",
        "º": "°",
        "≈": r"\approx ",
        "\u00a0": " ",
        "\u202f": " ",
        "√": r"\sqrt ",
        "′": "'",
    }
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_FUNCTION = r"(?:sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp)"
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\*\*", ""),
        (
            r"(?<!\\)\\[()\[\]!,]|\\(?:left|right|bigl?|bigr|Bigl?|Bigr|displaystyle)(?![A-Za-z])",
            "",
        ),
        (r"(?<!\\)\\[;: ]|~|\\q?quad(?![A-Za-z])|\s+", " "),
        (r"(?<=[0-9}])\$ (?=[A-Za-z])", " "),
        (r"\{,\}", ","),
        (r"\\%", "%"),
        (r"\^\{?\\circ\}?(?![A-Za-z])|\\degree(?![A-Za-z])", "°"),
        (r"\\(le|ge)q?(?:slant)?(?![A-Za-z])", r"\\\1 "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\l?brace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\varnothing(?![A-Za-z])|\\\{ ?\\\}|^\{ ?\}$", r"\\emptyset"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac ?(\d) ?(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac ?(\d) ?\{", r"\\frac{\1}{"),
        (r"\\frac ?(\{[^{}]*\}) ?(\d)", r"\\frac\1{\2}"),
        (r"(?<![A-Za-z\\])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (rf"(?<![A-Za-z\\])({_FUNCTION})(?=[ (^_])", r"\\\1"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"_\{(\w+)\}", r"_\1"),
        (r" +", " "),
        (r" ?([-+/={(^<>]) ?", r"\1"),  # never between digits: "1 1/2" is not 11/2
        (r" ?([)}°%]) ?(?![A-Za-z])", r"\1"),
    ]
]
_NO_NUMBERS = {"nan", "inf", "infinity"}


def normal(text: str) -> str:
    """Return one spelling of an answer, without markup, in ASCII, with equal spaces and fractions;
    "" if it cannot be an answer."""
    text = text.translate(_CHARACTERS).strip(MARKUP + "$").rstrip(".").strip(MARKUP + "$")
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.lstrip(" ,;").rstrip(" .,;")
    return "" if text.lstrip("+-").casefold() in _NO_NUMBERS else text


_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\{([^{}]*)\}"
)


def without_fonts(text: str, put: str = r"\1") -> str:
    r"""Remove `\text{...}` and its like around words. put: the replacement, in which `\1` are the
    words."""
    return _WRAPPED.sub(put, text)
