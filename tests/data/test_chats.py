"""Reading chats for supervised fine-tuning."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.data.chats import parse_chat
from tandem.data.readers import read_rows
from tandem.runtime.errors import UserError

USER, ASSISTANT = {"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}
PARTS = [
    {"type": "text", "text": "1 + 1 "},
    {"type": "text", "text": "="},
    {"type": "text", "text": "2"},
]
SYSTEM = {"role": "system", "content": "Be brief."}


def jsonl(path, *rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


@pytest.mark.parametrize(
    ("row", "chat"),
    [
        ({"messages": [USER, ASSISTANT]}, (USER, ASSISTANT)),
        (
            {"messages": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]},
            (SYSTEM, USER, ASSISTANT, USER, ASSISTANT),
        ),
        ({"prompt": "1 + 1 =", "response": "2"}, (USER, ASSISTANT)),
        ({"prompt": [SYSTEM, USER], "response": "2", "level": 3}, (SYSTEM, USER, ASSISTANT)),
        ({"prompt": "the whole chat wins", "messages": [USER, ASSISTANT]}, (USER, ASSISTANT)),
        ({"prompt": "1 + 1 =", "response": "2", "messages": None}, (USER, ASSISTANT)),
        ({"prompt": "1 + 1 =", "completion": "2"}, (USER, ASSISTANT)),
        ({"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}, (SYSTEM, USER, ASSISTANT)),
        (
            {
                "conversations": [
                    {"from": "human", "value": "1 + 1 ="},
                    {"from": "gpt", "value": "2"},
                ]
            },
            (USER, ASSISTANT),
        ),
        ({"instruction": "1 + 1 =", "input": "", "output": "2"}, (USER, ASSISTANT)),
        (
            {"instruction": "1", "input": "+ 1 =", "output": "2"},
            ({**USER, "content": "1\n\n+ 1 ="}, ASSISTANT),
        ),
        ({"messages": [USER, ASSISTANT | {"tool_calls": [], "name": None}]}, (USER, ASSISTANT)),
        (
            {"messages": [{**USER, "content": PARTS[:2]}, {**ASSISTANT, "content": PARTS[2:]}]},
            (USER, ASSISTANT),
        ),
    ],
)
def test_a_chat_is_read_in_the_forms_that_data_sets_have(tmp_path, row, chat):
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "c.parquet")
    assert read_rows(jsonl(tmp_path / "c.jsonl", row), parse_chat, key="sft.train") == [chat]
    assert read_rows(str(tmp_path / "c.parquet"), parse_chat, key="sft.train") == [chat]


@pytest.mark.parametrize(
    ("row", "where", "said"),
    [
        ("{", ":2", "broken JSON at column 2"),
        ({}, ":2, messages", "an empty row"),
        ({"id": 1}, ":2, messages", 'next:     write a row as {"prompt": '),
        ({"conversations": []}, ":2, conversations", "an empty list"),
        ({"conversation": [USER, ASSISTANT]}, ":2, messages", "rename conversation to messages"),
        ({"prompt": "?", "target": "2"}, ":2, response", "rename target to response"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            ":2, messages[0].content[0]",
            "a part {",
        ),
        (
            {"instruction": "?", "input": 3, "output": "2"},
            ":2, instruction and input",
            "expected: text",
        ),
        ({"prompt": "?", "response": ""}, ":2, response", "empty text"),
        ({"prompt": "?", "response": 2}, ":2, response", "found:    2"),
        ({"prompt": [], "response": "2"}, ":2, prompt", "an empty list"),
        ({"prompt": [ASSISTANT], "response": "2"}, ":2, prompt", "ends with the user's message"),
        ({"messages": "text"}, ":2, messages", "a list of messages"),
        ({"messages": []}, ":2, messages", "an empty list"),
        ({"messages": [USER]}, ":2, messages", "ends with the assistant's message"),
        ({"messages": [SYSTEM, ASSISTANT]}, ":2, messages", "a user's message first"),
        (
            {"messages": [USER, ASSISTANT | {"role": "gpt"}]},
            ":2, messages[1].role",
            'found:    "gpt"',
        ),
        (
            {"messages": [USER, ASSISTANT | {"content": None}]},
            ":2, messages[1]",
            "a message with a 'content'",
        ),
        (
            {"messages": [USER, ASSISTANT | {"tool_calls": [1]}]},
            ":2, messages[1].tool_calls[0]",
            "found:    1",
        ),
    ],
)
def test_a_bad_chat_is_told_with_line_field_and_reason(tmp_path, row, where, said):
    path = jsonl(tmp_path / "c.jsonl", {"prompt": "?", "response": "2"}, row)
    with pytest.raises(UserError) as caught:
        read_rows(path, parse_chat, key="sft.train")
    message = str(caught.value)
    assert message.startswith("sft.train has a row that cannot be used\n")
    assert f"  where:    {path}{where}" == message.splitlines()[1]
    assert said in message
