"""A base model without a chat template, with one of the user's: every command takes it, exports
keep it, and a run resumes with the same only."""

import shutil

import pytest
from transformers import AutoTokenizer

from tandem.run_folder.checkpoint import step_name
from tests.support.home import make_home, mistake, output_of

STEPS = 1


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home whose model has its chat template in a file apart, which `base` lacks."""
    home = make_home(tmp_path_factory.mktemp("home"), STEPS)
    shutil.copytree(home / "model", home / "base")
    tokenizer = AutoTokenizer.from_pretrained(home / "base")
    (home / "chat.jinja").write_text(tokenizer.chat_template)
    (home / "base/chat_template.jinja").unlink()
    assert AutoTokenizer.from_pretrained(home / "base").chat_template is None
    return home


def run(home, command, folder, model, *overrides):
    options = [f"run.folder={folder}", f"model.path={home / model}", *overrides]
    if command == "sft":
        options += [f"sft.train={home / 'data/warm.jsonl'}", f"sft.steps={STEPS}"]
    return command, home / "recipe.toml", *options


@pytest.mark.parametrize("command", ["train", pytest.param("sft", marks=pytest.mark.nightly)])
def test_base_model_trains_as_one_with_that_template(home, command, tmp_path):
    assert "data.chat_template=FILE" in mistake(*run(home, command, tmp_path / "none", "base"))
    template = f"data.chat_template={home / 'chat.jinja'}"
    for name, model, *overrides in (("own", "model"), ("given", "base", template)):
        output_of(*run(home, command, tmp_path / name, model, *overrides))
    exported = [tmp_path / name / "hf" / step_name(STEPS) for name in ("own", "given")]
    one, other = ((folder / "model.safetensors").read_bytes() for folder in exported)
    assert one == other
    text = (home / "chat.jinja").read_text()
    assert AutoTokenizer.from_pretrained(exported[1]).chat_template == text
    output_of("eval", home / "recipe.toml", f"model.path={exported[1]}")
    output_of("export", tmp_path / "given", "--out", tmp_path / "again")
    assert AutoTokenizer.from_pretrained(tmp_path / "again").chat_template == text


def test_template_is_part_of_the_run(home, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text((home / "chat.jinja").read_text())
    command = run(home, "train", tmp_path / "run", "base", f"data.chat_template={file}")
    output_of(*command)
    file.write_text(file.read_text() + "{# the same text, another file #}")
    assert "data.chat_template" in mistake(*command, f"run.steps={STEPS + 1}")
