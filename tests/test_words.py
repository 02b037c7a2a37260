"""The words of the code: those of the field, and docstrings that say at once what a thing does."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tandem").rglob("*.py"))
BESIDE = [
    path
    for folder in ("benchmarks", "chaos", "examples", "tests", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
DROPPED = """
seat playground player_of Player player told untold tell bring imitate annotate Rolled rolled
rolled_out hurry crew Crew Patience storm Handed Lost Garbage Item Draft drawing Again Verdict
fate Parting parted Asked Said Called Filter Seen begun past_after pause_after how said fit
drive Job Stepped correct World Clock keeping trying trainings rescored
"""
# A docstring of a function begins with a verb, one of a class or a module with a noun.
VAGUE = "What Who Where Whether Of As Until How If When Which While That Those"
NO_VERB = f"{VAGUE} The A An Each One All Every It Its This No Some"


def test_words_that_were_dropped_do_not_come_back():
    """Names that only this project used; docs/develop/architecture.md has those of today."""
    found = {
        f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}"
        for path in FILES
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.NAME and token.string in DROPPED.split()
    }
    assert found == set()


def test_docstrings_begin_with_a_verb_or_a_noun():
    assert [place for place, node, word in first_words(FILES) if not begins_well(node, word)] == []


def test_docstrings_beside_the_package_begin_with_their_subject():
    assert [place for place, _, word in first_words(BESIDE) if word in VAGUE.split()] == []


def first_words(paths):
    """Yield (place, node, first word) of every docstring."""
    documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, documented):
                continue
            for word in (ast.get_docstring(node) or "").split(maxsplit=1)[:1]:
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {word}", node, word


def begins_well(node, word):
    if isinstance(node, ast.ClassDef | ast.Module) or is_property(node):
        return word not in VAGUE.split()
    return word not in NO_VERB.split() and re.match("[A-Z][a-z]+", word) is not None


def is_property(node):
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
