"""Code blocks of README and docs/: how each is checked, and those that run.

A comment on the line before a block says what a test does with it. `<!-- runs -->` runs the cheap commands
of the block. `<!-- not run: REASON -->` only checks that commands and options are there. `<!-- file PATH -->` shows a
file. TOML loads as a recipe, JSON as rows, Python is executed; a block of another kind needs a comment. Where the
`# ...` behind a command ends in `, ...`, the output must have what stands before.
"""

import json
import re
import runpy
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.pages import BLOCK, ROOT, name

CHEAP = ("plan", "generate", "tiny", "try", "version")  # commands that a test runs
MARK = re.compile(r"<!-- (runs|not run|file|demo):? ?(.*?) -->\n *$")


@dataclass(frozen=True, kw_only=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    mark: str  # runs, not run, file, demo, or empty
    about: str  # the reason, or the file

    @property
    def place(self) -> str:
        return f"{name(self.page)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page with their marks."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        mark = MARK.search(text[: found.start()])
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start()) + 1,
            language=found[2],
            text=re.sub(f"(?m)^{found[1]}", "", found[3]),
            mark=mark[1] if mark else "",
            about=mark[2] if mark else "",
        )


def fault(block: Block) -> str:
    """Return why no test stands for a block; empty if one does."""
    if block.mark == "not run" and len(block.about) < 8:
        return f"{block.place}: the reason is missing"
    if not block.mark and block.language not in ("toml", "json", "python"):
        return f"{block.place}: neither run nor marked with its reason"
    if block.mark == "file" and not (ROOT / block.about).exists():
        return f"{block.place}: there is no {block.about}"
    return ""


def rows(block: Block) -> Iterator[object]:
    """Yield the values of a JSON block: one after the other, each over one line or several."""
    rest = block.text.strip()
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        yield value
        rest = rest[end:].strip()


def write_files(page: Path, folder: Path) -> None:
    """Write the page's files into a folder: blocks that begin with `# NAME`, and its JSON rows."""
    for block in blocks(page):
        if named := re.match(r"# ([\w/]+\.(?:py|toml))\n", block.text):
            (folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / named[1]).write_text(block.text)


def prepare(tandem: Callable[[list[str]], str]) -> None:
    """Put into this folder what the pages' commands name: a model, data, examples and recipes."""
    for folder in ("examples", "recipes"):
        shutil.copytree(ROOT / folder, folder)
    tandem(["tiny", "Qwen/Qwen3-0.6B", "--context", "2048"])
    tandem(["generate", "algebra", "--count", "600", "--out", "problems.jsonl"])
    tandem(["generate", "algebra", "--count", "60", "--split", "test", "--out", "held_out.jsonl"])
    Path("chats.jsonl").write_text('{"prompt": "1+1", "response": "2"}\n')
    Path("problems.csv").write_text("prompt,answer\n1+1,2\n")


def run(block: Block, tandem: Callable[[list[str]], str]) -> Iterator[str]:
    """Run the cheap commands of a block; yield what a comment promises and the output lacks."""
    for line in block.text.splitlines():
        command, _, comment = line.partition(" # ")
        words = shlex.split(command)
        if words[0] == "python":
            runpy.run_path(words[1], run_name="__main__")
        elif words[0] == "tandem" and words[1] in CHEAP:
            output = tandem(words[1:])
            promised = comment.strip().removesuffix(", ...")
            if comment.strip().endswith(", ...") and promised not in output:
                yield f"{block.place}: {promised!r} is not in the output: {output[-300:]}"
