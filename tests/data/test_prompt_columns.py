"""Columns that change the prompt: what the model reads of them, and what is refused by name."""

import json

import pytest

from tandem.config.schema import Config
from tandem.data.renderer import load_renderer
from tandem.model.tiny import TEMPLATE, make_tiny
from tandem.plugins.offline.inputs import dpo_inputs, sft_inputs
from tandem.runtime.errors import UserError
from tests.support.datasets import jsonl, parquet, read

SYSTEM = {"role": "system", "content": "Be brief."}
USER, ASSISTANT = {"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}
EARLIER = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SUB = {"type": "function", "function": {"name": "sub", "description": "less"}}
READS_ALL = (
    "{% if style %}{{ style }}{% endif %}{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
)
ROWS = {  # by command, without any such column
    "sft": {"prompt": "1 + 1 =", "response": "2"},
    "dpo": {"prompt": "1 + 1 =", "chosen": "2", "rejected": "3"},
    "train": {"prompt": "1 + 1 =", "answer": "2"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose template reads tools and a variable `style`."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(folder, max_tokens=2048, hidden=32, layers=1)
    (folder / "chat_template.jinja").write_text(READS_ALL)
    return folder


def write(folder, *rows, form="jsonl"):
    return {"jsonl": jsonl, "parquet": parquet}[form](folder / f"rows.{form}", *rows)


def texts_of(model, command, path):
    """The chats that a command trains on, the chosen ones of pairs; of problems, their prompts."""
    if command == "train":
        problems = read(path)
        return load_renderer(str(model)).texts([p.messages for p in problems], True)
    config = Config(model={"path": str(model)}, sft={"train": path}, preference={"train": path})
    inputs = sft_inputs(config) if command == "sft" else dpo_inputs(config)
    samples = inputs.samples if command == "sft" else [pair[0] for pair in inputs.train]
    return [inputs.renderer.tokenizer.decode(sample.tokens.tolist()) for sample in samples]


def written(*messages):
    return "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)


OPENINGS = [  # columns, and the messages that they put before the prompt's
    ({"system": "Be brief."}, [SYSTEM]),
    ({"system_prompt": "Be brief."}, [SYSTEM]),
    ({"system": "", "history": [], "tools": "[]", "chat_template_kwargs": None}, []),
    ({"history": [["a", "b"]]}, EARLIER),
    ({"history": [["a", "b"]] * 2, "system": "Be brief."}, [SYSTEM, *EARLIER, *EARLIER]),
    ({"system": "Be brief.", "prompt": [SYSTEM, USER]}, [SYSTEM]),
    ({"history": [["a", "b"]], "prompt": [SYSTEM, USER]}, [SYSTEM, *EARLIER]),
]


@pytest.mark.parametrize("command", ROWS)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_columns_before_the_prompt_are_read_in_front_of_it(model, tmp_path, command, form):
    rows = [ROWS[command] | {"prompt": [USER]} | columns for columns, _ in OPENINGS]
    texts = texts_of(model, command, write(tmp_path, *rows, form=form))
    for text, (_, opening) in zip(texts, OPENINGS, strict=True):
        assert text.startswith(written(*opening, USER) + "<|assistant|>")


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_a_whole_chat_gets_the_system_message_of_its_row(model, tmp_path, name):
    path = write(tmp_path, {"system": "Be brief.", name: [USER, ASSISTANT]})
    assert texts_of(model, "sft", path) == [written(SYSTEM, USER, ASSISTANT)]
    pair = {"chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT | {"content": "3"}]}
    path = write(tmp_path, pair | {"system": "Be brief."})
    assert texts_of(model, "dpo", path) == [written(SYSTEM, USER, ASSISTANT)]


@pytest.mark.parametrize("command", ["sft", "dpo"])
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_tools_and_variables_of_a_row_reach_the_template(model, tmp_path, command, form):
    row, plain = ROWS[command], written(USER, ASSISTANT)
    rows = [
        row | {"tools": [ADD, SUB], "chat_template_kwargs": {"style": "short"}},
        row,
        row | {"tools": [SUB]},
        row | {"chat_template_kwargs": {"other": 1, "style": "long"}},
    ]
    expected = ["short" + json.dumps([ADD, SUB]), "", json.dumps([SUB]), "long"]
    path = write(tmp_path, *rows, form=form)
    assert texts_of(model, command, path) == [start + plain for start in expected]
    encoded = [
        {name: json.dumps(v) for name, v in each.items() if name not in row} for each in rows
    ]
    path = write(tmp_path, *(row | each for each in encoded), form=form)
    assert texts_of(model, command, path) == [start + plain for start in expected]


def test_pairs_that_the_template_makes_equal_are_refused(tmp_path):
    make_tiny(tmp_path / "model", hidden=32, layers=1)
    trimmed = TEMPLATE.replace("message['content']", "message['content'] | trim")
    (tmp_path / "model/chat_template.jinja").write_text(trimmed)
    pair = ROWS["dpo"]
    path = write(tmp_path, pair, pair | {"chosen": " 3"}, pair | {"rejected": "2\n"})
    with pytest.raises(UserError, match="train has 2 pairs that cannot be used") as caught:
        texts_of(tmp_path / "model", "dpo", path)
    assert caught.value.where == "preference.train, pair 2"
