"""Put docs/ and results/ into build/pages, which zensical builds the site of: `make site`.

A link is as GitHub follows it. On the site, docs/ is the root and results/ a folder of it; a link to any
other file of the repository leads to the repository.
"""

import os
import re
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "pages"
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    shutil.copytree(ROOT / "results", PAGES / "results")
    repository = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["repo_url"]
    for page in PAGES.rglob("*.md"):
        source = source_of(page.relative_to(PAGES))
        page.write_text(
            LINK.sub(
                lambda m, s=source: f"{m[1]}{place(m[2], s, repository)}{m[3]}", page.read_text()
            )
        )


def source_of(page: Path) -> Path:
    """The file in the repository, e.g. guide/data.md: docs/guide/data.md."""
    return page if page.parts[0] == "results" else Path("docs", page)


def place(target: str, source: Path, repository: str) -> str:
    """Return the target of a link as it is on the site."""
    if "://" in target:
        return target
    file = Path(os.path.normpath(source.parent / target))
    if file.parts[0] not in ("docs", "results"):
        return f"{repository}/blob/main/{file}"
    return os.path.relpath(on_site(file), on_site(source).parent)


def on_site(file: Path) -> Path:
    return file.relative_to("docs") if file.parts[0] == "docs" else file


if __name__ == "__main__":
    main()
