"""README and the pages name keys, links, recipes and commands that are there."""

import re
from pathlib import Path

import click
import pytest
import typer

from tandem.cli.main import app
from tandem.config.recipe import load_config
from tandem.config.schema import Config
from tests.support.home import output_of
from tools.blocks import blocks, fault, prepare, rows, run, write_files
from tools.pages import PAGES, PROSE, ROOT, broken_links, commands, name, named_pages, written_lines

each_page = pytest.mark.parametrize("page", PAGES, ids=name)
KEY = re.compile(r"`(?:tandem [^`]*? )?([a-z]+)\.([a-z_0-9]+)(?=[.=` ])")
OTHERS = """
data.train_files data.val_files data.train_batch_size data.max_prompt_length
data.max_response_length data.filter_overlong_prompts critic.optim
rl.prompt_per_step
"""  # of verl, in the page on migration; a key misspelt on purpose


@each_page
def test_a_page_names_keys_that_are_there(page):
    sections = {name: field.annotation.model_fields for name, field in Config.model_fields.items()}
    unknown = {
        f"{section}.{key}"
        for section, key in KEY.findall(page.read_text(encoding="utf-8"))
        if section in sections and key not in sections[section] and key not in ("py", "md", "json")
    }
    assert unknown - {*OTHERS.split()} == set()


def test_the_documentation_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 100
    assert sum(map(written_lines, PROSE)) <= 2500


def test_every_page_is_in_the_site():
    listed = re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text())
    assert sorted(listed) == sorted(name(page).removeprefix("docs/") for page in PAGES[3:])


def test_code_and_scripts_name_pages_that_are_there():
    named = named_pages()
    missing = {page for page in named if not (ROOT / page).exists()}
    assert missing <= {"results/gpu.json"} and len(named) > 30  # no GPU has written that


@each_page
def test_links_lead_somewhere(page):
    assert [*broken_links(page)] == []


@each_page
def test_every_block_of_a_page_is_run_or_marked_with_its_reason(page):
    assert [fault(block) for block in blocks(page) if fault(block)] == []


@each_page
def test_recipes_rows_and_python_of_a_page_are_right(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if block.language == "toml":
            Path("recipe.toml").write_text(block.text)
            load_config(Path("recipe.toml"), [])
        if block.language == "json":
            assert all(isinstance(row, dict) for row in rows(block))
        if block.language == "python" and block.mark != "not run":
            exec(compile(block.text, block.place, "exec"), {"__name__": "shown"})


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem
)
def test_a_recipe_loads_and_says_how_it_is_run_and_what_to_expect(path):
    load_config(path, [])
    head, _, commands = path.read_text().partition("\n#\n")
    assert head.count("Expected") == 1 and re.search(r"(?m)^#   .*(tandem|python) ", commands)


def test_cheap_commands_of_the_pages_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(tandem := lambda words: output_of(*words))
    for page in PAGES:
        write_files(page, tmp_path)
        assert [m for b in blocks(page) if b.mark == "runs" for m in run(b, tandem)] == []


@each_page
def test_commands_of_a_page_are_there(page):
    group = typer.main.get_command(app)
    for command, *words in commands(page):
        context = click.Context(group, info_name="tandem")
        found = group.get_command(context, command)
        assert found is not None, f"tandem {command}"
        found.make_context(command, words, parent=context)
        load_config(None, [word for word in words if re.match(r"[a-z]+(\.[a-z_.0-9]+)?=", word)])
