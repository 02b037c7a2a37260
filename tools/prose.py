"""Check the English of README and docs/: length of sentences, pronouns, private words. Part of `make lint`.

python tools/prose.py [PAGE ...]

Tables, code and generated pages are left out: a table's cell is no sentence. No library does this: vale's
package fetches a binary, and proselint has no rules of one's own.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pages import PROSE, ROOT, name

PAGES = [*(ROOT / page for page in ("README.md", "CONTRIBUTING.md", "AGENTS.md")), *PROSE]
LONGEST = 35  # words of a sentence
PRONOUNS = 2  # of a sentence, most
PRONOUN = re.compile(r"\b(?:it|its|they|them|their|theirs|those|these|itself|themselves)\b", re.I)
PRIVATE = {  # a pattern: what is written instead
    r"\bfor whom\b": "for people who",
    r"\bas ever\b": "as before",
    r"\bof (?:which|whom)\b": "a sentence of its own",
    r"^(?:So|Nor) (?:do|does|is|are)\b": "the subject first",
    r"^Of (?:a|an|the|other|several|these|those)\b": "the subject first",
    r"^(?:Those|That) of\b": "the noun",
    r"\bon their way\b": "in flight",
    r"\bunder way\b": "in flight, or running",
    r"\bkeeps? nobody\b": "delays only",
    r"\bis the matter of\b": "handled by",
    r"\bgo(?:es)? on from\b": "continues from",
    r"\ba function of yours\b": "your own function",
}
CODE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->", re.M | re.S)
LIST = re.compile(r"`code`(?:,? (?:and |or )?`code`)+")


def main() -> None:
    pages = [Path(page).resolve() for page in sys.argv[1:]] or PAGES
    found = [f"{name(page)}:{line}: {fault}" for page in pages for line, fault in faults(page)]
    print("\n".join(found), end="\n" if found else "")
    sys.exit(bool(found))


def faults(page: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, fault) of a page."""
    for line, sentence in sentences(page.read_text(encoding="utf-8")):
        words = len(re.findall(r"[\w'`./=-]+", sentence))
        if words > LONGEST:
            yield line, f"{words} words, at most {LONGEST}: {sentence[:70]}"
        if (pronouns := len(PRONOUN.findall(sentence))) > PRONOUNS:
            yield line, f"{pronouns} pronouns, at most {PRONOUNS}: {sentence[:70]}"
        for pattern, better in PRIVATE.items():
            if re.search(pattern, sentence):
                yield line, f"write {better!r}: {sentence[:70]}"


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, sentence) of paragraphs and list items; code in backticks counts as one word."""
    text = CODE.sub(lambda block: "\n" * block[0].count("\n"), text)
    line = 1
    for part in re.split(r"(\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.) ))", text):
        body = part.strip()
        start = line + len(part[: len(part) - len(part.lstrip())].splitlines())
        line += part.count("\n")
        if not body or body[0] in "|#!" or body.startswith("    "):
            continue
        body = re.sub(r"^(?:[-*>]|\d+\.) ", "", body)
        body = re.sub(r"`[^`]*`", "`code`", body)
        body = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(body.split()))
        body = body.replace("**", "").replace("e.g.", "eg").replace("eq. ", "eq ")
        for sentence in re.split(r"(?<=[.?!])\s+", LIST.sub("`code`", body)):
            if sentence:
                yield start, sentence


if __name__ == "__main__":
    main()
