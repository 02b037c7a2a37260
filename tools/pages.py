"""Contents of README and of the pages of docs/ and results/: links, headings, code blocks, commands.

tests/test_docs.py checks them.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FROM_CODE = ("config.md", "plugins.md")  # pages of docs/ that a script makes
PROSE = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name not in FROM_CODE)
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "results").glob("*.md")),
]
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.M | re.S)


def written_lines(page: Path) -> int:
    """Count the lines of a page without comments and the files that `make figures` copies into it."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"(?ms)^<!-- file .*?^<!-- /file -->\n|^<!-- [^\n]*-->\n", "", text)
    return len(text.splitlines())


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def broken_links(page: Path) -> Iterator[str]:
    """Yield the links of a page that lead to no file or heading of the repository."""
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        found = page.parent / target if target else page
        if not found.exists() or (anchor and anchor[1:] not in anchors(found)):
            yield target + anchor


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each `tandem` command in a page's blocks and indented lines."""
    text = page.read_text(encoding="utf-8")
    for found in re.findall(r"^(?:    )?(?:\.venv/bin/)?tandem ((?:[^`#\n]|#(?! ))+)", text, re.M):
        if "..." not in found and not found.rstrip().endswith(("\\", "|")):
            yield [word for word in shlex.split(found.partition(" && ")[0]) if word != "&"]


def named_pages() -> set[str]:
    """The pages and files of results/ that code, scripts and recipes name."""
    folders = ("tandem", "tools", "benchmarks", "chaos", "examples", "recipes", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    pattern = r"\b(?:docs|results)/[\w/-]+\.(?:md|json)\b"
    return {
        page
        for path in [*files, ROOT / "Makefile"]
        if path.suffix in (".py", ".toml", "")
        for page in re.findall(pattern, path.read_text(encoding="utf-8"))
    }
