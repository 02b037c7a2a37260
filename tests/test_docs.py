"""What the pages say of the configuration is true of it."""

import re
from pathlib import Path

import pytest

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
