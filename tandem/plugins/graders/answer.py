r"""The `answer` verifier: is the completion's final answer the ground truth? 1.0 or 0.0.

The final answer is the text behind the last `Answer:`, or the content of the last `\boxed{...}`,
whichever comes last; a mere number in the prose never counts, nor does an answer that is taken back
afterwards. answer_compare.py compares.

Knows neither problems nor processes. Math-Verify can run forever inside one C call: score untrusted
text through RewardPool, whose clock is outside.

    python -c "from tandem.plugins.graders.answer import score; print(score('Answer: 0.5', '1/2'))"
"""

import re

from tandem.plugins.graders.answer_compare import equal
from tandem.plugins.graders.answer_spelling import MARKUP

TEXT_CHARS = 2_000  # the final answer is near the end; a longer tail only costs time


def score(text: str, answer: str) -> float:
    """Return 1.0 if the final answer of text equals answer, else 0.0."""
    final = extract(text)
    return float(final is not None and equal(final, answer))


# ---------------------------------------------------------------- the final answer of a completion

_ANSWER = re.compile(
    r"(?:(?<![a-z])|(?<=final)|(?-i:(?<=[a-z])(?=A)))answer(?:[ \t]+is)?[ \t*_`]*[:：]",
    re.IGNORECASE,
)
_IT = r"(?:that|this|it|which|answer|result|above)"
_WRONG = r"(?:wrong|incorrect|mistaken|not (?:right|correct)|an error)"
_TAKEN_BACK = re.compile(
    rf"\b(?:{_IT}(?:'s| is| was| seems| looks)? (?:clearly |actually )?{_WRONG}"
    r"|(?:that|answer|result)(?:'s| is) impossible"
    rf"|{_IT} (?:isn't|wasn't|can't be|cannot be|can not be) (?:right|correct|true)"
    r"|(?:this|that|which) contradicts"
    r"|(?:is|was) (?:the )?(?:wrong|incorrect)|(?:is not|isn't|was not) the (?:\w+ )?answer"
    r"|i (?:was|am|'m) (?:wrong|mistaken)"
    r"|i(?:'ve)? (?:made|see) (?:an?|my) (?:\w+ )?(?:mistake|error)|(?:scratch|scrap) that"
    r"|i (?:take|took) (?:that|it|this) back|(?:be|is) (?:discarded|withdrawn)"
    r"|(?:ignore|disregard|discard) (?:that|this)|on second thought|hold on|no,? wait|wait,? no"
    r"|(?:no|wait|hmm|sorry|oops)[,.!—:]? *actually|correction:|actually,? (?:it|the|that|no|wait)"
    r"|should (?:be|have been)(?= *(?:\$|\\|-?[0-9])))",
    re.IGNORECASE,
)
_BETWEEN_BOXES = re.compile(
    r"[\s$.]*(?:[,;]|\\text\{ ?(?:and|or) ?\}|\b(?:and|or)\b)"
    r"(?!.*\b(?:rather|actually|not|no|wait)\b)"
    r"(?:[\s$,]|\\q?quad|\b(?:and|or)\b)*(?:[A-Za-z(\\][^=.]{0,40}=[\s$]*)?"
)


def extract(text: str) -> str | None:
    r"""Return the final answer as written; None without one, or if it is taken back.

    Example: "**Answer:** $5$." gives "$5$.". Boxes with nothing but commas, "and" or "or" between
    them are one answer: "\boxed{2} and \boxed{3}" gives "2, 3".
    """
    text = text[-TEXT_CHARS:]
    candidate = _last_boxed(text)
    for match in list(_ANSWER.finditer(text))[-1:]:
        lines = [line for line in text[match.end() :].splitlines() if line.strip(MARKUP)]
        start = text.index(lines[0], match.end()) if lines else len(text)
        if lines and (candidate is None or candidate[1] < start + len(lines[0])):
            candidate = _last_boxed(lines[0]) or (lines[0], 0)
            candidate = candidate[0], start + candidate[1]
    return None if candidate is None or _TAKEN_BACK.search(text, candidate[1]) else candidate[0]


_BOX = re.compile(r"\\f?boxed\s*\{([^{}]*)\}")


def _last_boxed(text: str) -> tuple[str, int] | None:
    r"""Find the content of the last complete \boxed{...}, or of the last ones that belong together,
    and the place of the first of them.

    A truncated box at the very end does not hide the one before.
    """
    starts = list(re.finditer(r"\\f?boxed\s*\{", text))
    boxes, before = list[str](), 0
    for match in reversed(starts):
        end = _closing_brace(text, match.end())
        if end is None:
            continue
        if boxes and end >= before:  # a box around those
            boxes, before = [_BOX.sub(r"\1", text[match.end() : end])], match.start()
            continue
        if boxes and not _BETWEEN_BOXES.fullmatch(text, end + 1, before):
            break
        boxes.insert(0, text[match.end() : end])
        before = match.start()
    return (", ".join(dict.fromkeys(boxes)), before) if boxes else None


def _closing_brace(text: str, start: int) -> int | None:
    r"""Find the brace that closes the one before start; \{ and \} are not braces."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None
