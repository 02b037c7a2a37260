"""Reading chats and preferences: every form of a row, and what is said of one that cannot be
used."""

import pytest

from tandem.data.readers import read_rows
from tandem.plugins.offline.rows import Preference, parse_chat, parse_preference
from tandem.runtime.errors import UserError
from tests.support.datasets import jsonl, parquet

SYSTEM = {"role": "system", "content": "Be brief."}
USER, MORE = {"role": "user", "content": "1 + 1 ="}, {"role": "user", "content": "Sure?"}
GOOD, BAD = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}
TOOL = {"role": "tool", "content": "2.0"}
PAIR = {"prompt": "1 + 1 =", "chosen": "2", "rejected": "3"}
PARTS = [{"type": "text", "text": text} for text in ("1 + 1 ", "=", "2")]


def preference(prompt, chosen, rejected):
    return Preference(prompt=tuple(prompt), chosen=tuple(chosen), rejected=tuple(rejected))


SIMPLE = preference([USER], [GOOD], [BAD])
CHATS = [
    ({"messages": [USER, GOOD]}, (USER, GOOD)),
    ({"prompt": "1 + 1 =", "response": "2"}, (USER, GOOD)),
    ({"prompt": "the whole chat wins", "messages": [USER, GOOD]}, (USER, GOOD)),
    ({"prompt": "1 + 1 =", "response": "2", "messages": None}, (USER, GOOD)),
    ({"prompt": [SYSTEM, USER], "completion": [GOOD]}, (SYSTEM, USER, GOOD)),
    (
        {"conversations": [{"from": "human", "value": "1 + 1 ="}, {"from": "gpt", "value": "2"}]},
        (USER, GOOD),
    ),
    ({"instruction": "1 + 1 =", "input": "", "output": "2"}, (USER, GOOD)),
    (
        {"instruction": "1", "input": "+ 1 =", "output": "2"},
        ({**USER, "content": "1\n\n+ 1 ="}, GOOD),
    ),
    ({"messages": [USER, GOOD | {"tool_calls": [], "name": None}]}, (USER, GOOD)),
    ({"messages": [{**USER, "content": PARTS[:2]}, {**GOOD, "content": PARTS[2:]}]}, (USER, GOOD)),
]
PAIRS = {
    "text": (PAIR, SIMPLE),
    "messages and text": (
        PAIR | {"prompt": [SYSTEM, USER]},
        preference([SYSTEM, USER], [GOOD], [BAD]),
    ),
    "text and continuations": (PAIR | {"chosen": [GOOD], "rejected": [BAD]}, SIMPLE),
    "whole chats": ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, SIMPLE),
    "several turns": (
        {"prompt": [USER], "chosen": [GOOD, MORE, GOOD], "rejected": [BAD, MORE, GOOD]},
        preference([USER], [GOOD, MORE, GOOD], [BAD, MORE, GOOD]),
    ),
    "prompt with an answer": (
        {"prompt": [USER, GOOD, MORE], "chosen": "2", "rejected": "3"},
        preference([USER, GOOD, MORE], [GOOD], [BAD]),
    ),
    "prompt that ends with a tool": (
        {"prompt": [USER, BAD, TOOL], "chosen": "2", "rejected": "3"},
        preference([USER, BAD, TOOL], [GOOD], [BAD]),
    ),
    "implicit": ({"prompt": None, "chosen": [USER, GOOD], "rejected": [USER, BAD]}, SIMPLE),
    "implicit, the longest common start": (
        {"chosen": [SYSTEM, USER, GOOD, MORE, GOOD], "rejected": [SYSTEM, USER, GOOD, MORE, BAD]},
        preference([SYSTEM, USER, GOOD, MORE], [GOOD], [BAD]),
    ),
    "implicit, the chats part at a user's message": (
        {"chosen": [USER, GOOD, MORE, GOOD], "rejected": [USER, GOOD, USER, GOOD]},
        preference([USER], [GOOD, MORE, GOOD], [GOOD, USER, GOOD]),
    ),
    "implicit, the assistant speaks twice": (
        {"chosen": [USER, GOOD, GOOD], "rejected": [USER, GOOD, BAD]},
        preference([USER], [GOOD, GOOD], [GOOD, BAD]),
    ),
    "implicit, one goes on": (
        {"chosen": [USER, GOOD], "rejected": [USER, GOOD, MORE, BAD]},
        preference([USER], [GOOD], [GOOD, MORE, BAD]),
    ),
}
FORMS = [
    *((parse_chat, row, chat) for row, chat in CHATS),
    *((parse_preference, row, pair) for row, pair in PAIRS.values()),
]


@pytest.mark.parametrize(("parse", "row", "expected"), FORMS)
def test_a_row_is_read_in_every_form_that_data_sets_have(tmp_path, parse, row, expected):
    for path in (jsonl(tmp_path / "p.jsonl", row), parquet(tmp_path / "p.parquet", row)):
        assert read_rows(path, parse, key="sft.train") == [expected]


BAD_CHATS = [
    ("{", "", "broken JSON at column 2"),
    ({}, ", messages", "an empty row"),
    ({"id": 1}, ", messages", 'next:     write a row as {"prompt": '),
    ({"conversations": []}, ", conversations", "an empty list"),
    ({"prompt": "?", "target": "2"}, ", response", "rename target to response"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        ", messages[0].content[0]",
        "a part {",
    ),
    ({"instruction": "?", "input": 3, "output": "2"}, ", instruction and input", "expected: text"),
    ({"prompt": "?", "response": ""}, ", response", "empty text"),
    ({"prompt": [GOOD], "response": "2"}, ", prompt", "ends with the user's message"),
    ({"messages": "text"}, ", messages", "a list of messages"),
    ({"messages": [USER]}, ", messages", "ends with the assistant's message"),
    ({"messages": [SYSTEM, GOOD]}, ", messages", "a user's message first"),
    ({"messages": [USER, GOOD | {"role": "gpt"}]}, ", messages[1].role", 'found:    "gpt"'),
    ({"messages": [USER, GOOD | {"content": None}]}, ", messages[1]", "a message with a 'content'"),
    (
        {"messages": [USER, GOOD | {"tool_calls": [1]}]},
        ", messages[1].tool_calls[0]",
        "found:    1",
    ),
]
BAD_PAIRS = [
    ({"prompt": "?", "rejected": "3"}, ", chosen", "expected: a column 'chosen'"),
    ({"prompt": "?", "answer": "3"}, ", chosen", 'next:     write a row as {"prompt": '),
    (PAIR | {"images": ["a.png"]}, ", images", "leave the column out"),
    ({"prompt": "?", "chosen": "3"}, ", rejected", "expected: a column 'rejected'"),
    ({"prompt": "?", "chosen": "3", "reject": "2"}, ", rejected", "rename reject to rejected"),
    ({"question": "?", "chosen": "2", "rejected": "3"}, ", prompt", "rename question to prompt"),
    (PAIR | {"rejected": [USER, GOOD]}, ", rejected", "found:    the same as chosen"),
    (PAIR | {"prompt": " "}, ", prompt", "an empty message"),
    (PAIR | {"prompt": [USER, GOOD]}, ", prompt", "found:    a last message from 'assistant'"),
    (PAIR | {"prompt": [GOOD, USER]}, ", prompt", "expected: a user's message first"),
    (PAIR | {"chosen": ""}, ", chosen", "an empty last message"),
    (PAIR | {"rejected": [GOOD, BAD | {"content": ""}]}, ", rejected", "an empty last message"),
    (PAIR | {"chosen": 2}, ", chosen", "expected: the assistant's text, or a list of messages"),
    (PAIR | {"chosen": None}, ", chosen", "found:    null"),
    (PAIR | {"rejected": [USER]}, ", rejected", "found:    a last message from 'user'"),
    (
        PAIR | {"rejected": [MORE, BAD]},
        ", rejected",
        "found:    a first message from 'user' that is not the prompt's",
    ),
    ({"chosen": [USER, GOOD], "rejected": "3"}, ", rejected", "expected: a list of messages"),
    (
        {"chosen": [GOOD], "rejected": [BAD]},
        ", rejected",
        "no common prompt: message 1 is \"2\" from 'assistant'",
    ),
    (
        {"chosen": [USER, GOOD], "rejected": [USER, MORE, BAD]},
        ", rejected",
        "no common prompt: message 2 is",
    ),
    (
        {"chosen": [SYSTEM, GOOD], "rejected": [SYSTEM, BAD]},
        ", chosen",
        "expected: a user's message first",
    ),
]
MISTAKES = [
    *((parse_chat, {"prompt": "?", "response": "2"}, *case) for case in BAD_CHATS),
    *((parse_preference, PAIR, *case) for case in BAD_PAIRS),
]


@pytest.mark.parametrize(("parse", "sound", "row", "where", "said"), MISTAKES)
def test_a_bad_row_is_told_with_line_field_and_reason(tmp_path, parse, sound, row, where, said):
    path = jsonl(tmp_path / "c.jsonl", sound, row)
    with pytest.raises(UserError) as caught:
        read_rows(path, parse, key="sft.train")
    message = str(caught.value)
    assert message.startswith("sft.train has a row that cannot be used\n")
    assert f"  where:    {path}:2{where}" == message.splitlines()[1]
    assert said in message
