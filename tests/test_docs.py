"""README and the pages name keys, links, recipes and commands that are there."""

import ast
import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from tandem.cli.main import app
from tandem.config.recipe import load_config
from tandem.config.schema import Config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
KEY = re.compile(r"`(?:tandem [^`]*? )?([a-z]+)\.([a-z_0-9]+)(?=[.=` ])")
OTHERS = """
data.train_files data.val_files data.train_batch_size data.max_prompt_length
data.max_response_length data.filter_overlong_prompts critic.optim
preference.dpo preference.ipo preference.bradley_terry rl.prompt_per_step
"""  # of verl, in docs/migrate.md; functions of rl/preference.py; a key misspelt on purpose


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_keys_that_are_there(page):
    sections = {name: field.annotation.model_fields for name, field in Config.model_fields.items()}
    unknown = {
        f"{section}.{key}"
        for section, key in KEY.findall(page.read_text(encoding="utf-8"))
        if section in sections and key not in sections[section] and key not in ("py", "md", "json")
    }
    assert unknown - {*OTHERS.split()} == set()


def test_readme_and_changelog_stay_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 100


LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")


def anchors(page):
    """GitHub's anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    broken = []
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        found = page.parent / target if target else page
        if not found.exists() or (anchor and anchor[1:] not in anchors(found)):
            broken.append(target + anchor)
    assert broken == []


BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.M | re.S)


def blocks(page, language):
    """(line, text) of a page's blocks in a language."""
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        if block[2] == language:
            yield text.count("\n", 0, block.start()) + 2, re.sub(f"(?m)^{block[1]}", "", block[3])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_of_a_page_load(page, tmp_path):
    for line, text in blocks(page, "toml"):
        recipe = tmp_path / f"line_{line}.toml"
        recipe.write_text(text)
        load_config(recipe, [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_of_a_page_can_be_parsed(page):
    for line, text in blocks(page, "python"):
        ast.parse(text, f"{page.name}:{line}")


def commands(page):
    """The words of each `tandem` command in a page's blocks and indented lines."""
    text = page.read_text(encoding="utf-8")
    for found in re.findall(r"^(?:    )?(?:\.venv/bin/)?tandem ((?:[^`#\n]|#(?! ))+)", text, re.M):
        if "..." not in found and not found.rstrip().endswith(("\\", "|")):
            yield [word for word in shlex.split(found.partition(" && ")[0]) if word != "&"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_are_there(page):
    """Their options and overrides too. Nothing runs."""
    group = typer.main.get_command(app)
    for command, *words in commands(page):
        context = click.Context(group, info_name="tandem")
        found = group.get_command(context, command)
        assert found is not None, f"tandem {command}"
        found.make_context(command, words, parent=context)
        load_config(None, [word for word in words if re.match(r"[a-z]+(\.[a-z_.0-9]+)?=", word)])
