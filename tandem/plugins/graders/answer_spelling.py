r"""One spelling for each answer: LaTeX, Unicode and plain text written alike, so that answers can
be compared as text.

Computes nothing, and knows neither numbers nor completions.

    python -c "from tandem.plugins.graders.answer_spelling import normal; \
        print(normal(r'$\left( \tfrac12,\; x \right)$.'))"
"""

import re
from functools import lru_cache

MARKUP = " \t\r\n*_`"
_SIGNS = r"""
− -      – -          × \times    · \cdot   ⋅ \cdot   ≤ \le       ≥ \ge      ∞ \infty   π \pi
θ \theta   ∪ \cup     ∈ \in       ± \pm     √ \sqrt   ½ \frac12   ¼ \frac14  ¾ \frac34
∅ \emptyset   ≈ \approx   º °     ′ '       。 .
"""
_CHARACTERS = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {
    ord(sign): f"{spelling} " if spelling[-1].isalpha() else spelling
    for sign, spelling in re.findall(r"(\S) (\S+)", _SIGNS)
}
_CHARACTERS |= dict.fromkeys((0xA0, 0x202F), " ")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_FUNCTION = r"(?:sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp)"
_WORDS = {"lt": "<", "gt": ">", "l?brace": r"\\{", "rbrace": r"\\}", "langle": "(", "rangle": ")"}
# Python's power sign; stars are markup where a pair stands before a word and all are in pairs
_POWER = re.compile(
    rf"(?<=[\w)}}\]!])( ?)\*\*\1(?=[-+({{\\.\d]|[A-Za-z](?![A-Za-z])|(?:{_FUNCTION}|pi)\b)"
)
_BOLD = re.compile(r"(?:^|\s)\*\*\S")
_REWRITES = [
    (r"\*\*", ""),
    (r"(?<!\\)\\[()\[\]!,]|\\(?:left|right|bigl?|bigr|Bigl?|Bigr|displaystyle)(?![A-Za-z])", ""),
    (r"(?<!\\)\\[;: ]|~|\\q?quad(?![A-Za-z])|\s+", " "),
    (r"(?<=[0-9}])\$ (?=[A-Za-z])", " "),
    (r"\{,\}", ","),
    (r"\\%", "%"),
    (r"\^\{?\\circ\}?(?![A-Za-z])|\\degree(?![A-Za-z])", "°"),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"\\(le|ge)q?(?:slant)?(?![A-Za-z])", r"\\\1 "),
    *((rf"\\{word}(?![A-Za-z])", sign) for word, sign in _WORDS.items()),
    (r"\\varnothing(?![A-Za-z])|\\\{ ?\\\}|^\{ ?\}$", r"\\emptyset"),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\frac ?(\d) ?(?=[\d{])", r"\\frac{\1}"),
    (r"\\frac ?(\{[^{}]*\}) ?(\d)", r"\\frac\1{\2}"),
    (r"(?<![A-Za-z\\])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (rf"(?<![A-Za-z\\])({_FUNCTION})(?=[ (^_])", r"\\\1"),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
    (r"_\{(\w+)\}", r"_\1"),
    (r" +", " "),
    (r" ?([-+/={(^<>]) ?", r"\1"),  # never between digits: "1 1/2" is not 11/2
    (r" ?([)}°%]) ?(?![A-Za-z])", r"\1"),
    (r"\^([-+](?:\d+(?:\.\d+)?|[A-Za-z])|\\sqrt\{[^{}]*\})", r"^{\1}"),
    (r"\^\(((?:[^()]|\([^()]*\))*)\)", r"^{\1}"),
    (r"(?<![\w.,^])1(?:\.0*)?(?: ?(?:\*|\\cdot))? ?(?=i(?![A-Za-z]))", ""),
    (r"(?<=\d)i(?![A-Za-z])", " i"),
]
_NO_NUMBERS = {"nan", "inf", "infinity"}


@lru_cache(256)  # the samples of a problem share its answer
def normal(text: str) -> str:
    """Return one spelling of an answer, without markup, in ASCII, with equal spaces and fractions;
    "" if it cannot be an answer."""
    is_markup = _BOLD.search(text) and text.count("**") % 2 == 0
    text = text.translate(_CHARACTERS).strip(MARKUP + "$").rstrip(".").strip(MARKUP + "$")
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    text = text if is_markup else _POWER.sub("^", text)
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    text = text.lstrip(" ,;").rstrip(" .,;")
    return "" if text.lstrip("+-").casefold() in _NO_NUMBERS else text


_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\{([^{}]*)\}"
)


def without_fonts(text: str, put: str = r"\1") -> str:
    r"""Remove `\text{...}` and its like around words. put: the replacement, in which `\1` are the
    words."""
    return _WRAPPED.sub(put, text)
