"""Reading preferences: every form of a row, and what is said of one that cannot be used."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.data.preferences import Preference, parse_preference
from tandem.data.readers import read_rows
from tandem.runtime.errors import UserError

SYSTEM = {"role": "system", "content": "Be brief."}
USER, MORE = {"role": "user", "content": "1 + 1 ="}, {"role": "user", "content": "Sure?"}
GOOD, BAD = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}
TOOL = {"role": "tool", "content": "2.0"}
PAIR = {"prompt": "1 + 1 =", "chosen": "2", "rejected": "3"}


def jsonl(path, *rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


def preference(prompt, chosen, rejected):
    return Preference(prompt=tuple(prompt), chosen=tuple(chosen), rejected=tuple(rejected))


SIMPLE = preference([USER], [GOOD], [BAD])
FORMS = {
    "text": (PAIR, SIMPLE),
    "messages and text": (
        PAIR | {"prompt": [SYSTEM, USER]},
        preference([SYSTEM, USER], [GOOD], [BAD]),
    ),
    "continuations": ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, SIMPLE),
    "text and continuations": (PAIR | {"chosen": [GOOD], "rejected": [BAD]}, SIMPLE),
    "whole chats": ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, SIMPLE),
    "text and whole chats": (PAIR | {"chosen": [USER, GOOD], "rejected": [USER, BAD]}, SIMPLE),
    "further columns": (PAIR | {"score_chosen": 9.0, "messages": [USER, GOOD]}, SIMPLE),
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
    "implicit": ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, SIMPLE),
    "implicit, prompt null": (
        {"prompt": None, "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        SIMPLE,
    ),
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


@pytest.mark.parametrize(("row", "expected"), FORMS.values(), ids=FORMS)
def test_a_preference_is_read_from_every_form_of_a_row(tmp_path, row, expected):
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "p.parquet")
    assert read_rows(
        jsonl(tmp_path / "p.jsonl", row), parse_preference, key="preference.train"
    ) == [expected]
    assert read_rows(str(tmp_path / "p.parquet"), parse_preference, key="preference.train") == [
        expected
    ]


def test_preferences_keep_the_order_of_the_file(tmp_path):
    path = jsonl(tmp_path / "p.jsonl", *(row for row, _ in FORMS.values()))
    assert read_rows(path, parse_preference, key="preference.train") == [
        expected for _, expected in FORMS.values()
    ]


MISTAKES = [
    ("{", "", "broken JSON at column 2"),
    ({"prompt": "?", "rejected": "3"}, ", chosen", "expected: a column 'chosen'"),
    ({"prompt": "?", "answer": "3"}, ", chosen", 'next:     write a row as {"prompt": '),
    (PAIR | {"images": ["a.png"]}, ", images", "leave the column out"),
    ({"prompt": "?", "chosen": "3"}, ", rejected", "expected: a column 'rejected'"),
    ({"prompt": "?", "chosen": "3", "reject": "2"}, ", rejected", "rename reject to rejected"),
    ({"question": "?", "chosen": "2", "rejected": "3"}, ", prompt", "rename question to prompt"),
    (PAIR | {"rejected": "2"}, ", rejected", "found:    the same as chosen"),
    (
        {"chosen": [USER, GOOD], "rejected": [USER, GOOD]},
        ", rejected",
        "found:    the same as chosen",
    ),
    (PAIR | {"rejected": [USER, GOOD]}, ", rejected", "found:    the same as chosen"),
    (PAIR | {"prompt": " "}, ", prompt", "an empty message"),
    (PAIR | {"prompt": []}, ", prompt", "an empty list"),
    (PAIR | {"prompt": 7}, ", prompt", "expected: text, or a list of messages"),
    (PAIR | {"prompt": [USER, GOOD]}, ", prompt", "found:    a last message from 'assistant'"),
    (PAIR | {"prompt": [SYSTEM]}, ", prompt", "expected: a user's message first"),
    (PAIR | {"prompt": [GOOD, USER]}, ", prompt", "expected: a user's message first"),
    (
        PAIR | {"prompt": [{"role": "human", "content": "?"}]},
        ", prompt[0].role",
        'found:    "human"',
    ),
    (PAIR | {"chosen": ""}, ", chosen", "an empty last message"),
    (PAIR | {"rejected": "\n"}, ", rejected", "an empty last message"),
    (PAIR | {"rejected": []}, ", rejected", "an empty list"),
    (PAIR | {"rejected": [GOOD, BAD | {"content": ""}]}, ", rejected", "an empty last message"),
    (PAIR | {"chosen": 2}, ", chosen", "expected: the assistant's text, or a list of messages"),
    (PAIR | {"chosen": None}, ", chosen", "found:    null"),
    (PAIR | {"rejected": [USER]}, ", rejected", "found:    a last message from 'user'"),
    (
        PAIR | {"rejected": [MORE, BAD]},
        ", rejected",
        "found:    a first message from 'user' that is not the prompt's",
    ),
    (PAIR | {"rejected": ["3"]}, ", rejected[0]", "expected: a message {role, content}"),
    ({"chosen": [USER, GOOD], "rejected": "3"}, ", rejected", "expected: a list of messages"),
    ({"chosen": None, "rejected": "3"}, ", chosen", "found:    null"),
    (
        {"chosen": [USER, GOOD], "rejected": [MORE, BAD]},
        ", rejected",
        "no common prompt: message 1 is",
    ),
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


@pytest.mark.parametrize(("row", "where", "said"), MISTAKES)
def test_a_bad_preference_is_told_with_line_field_and_reason(tmp_path, row, where, said):
    path = jsonl(tmp_path / "p.jsonl", PAIR, row)
    with pytest.raises(UserError) as caught:
        read_rows(path, parse_preference, key="preference.train")
    message = str(caught.value)
    assert message.startswith("preference.train has a row that cannot be used\n")
    assert f"  where:    {path}:2{where}" == message.splitlines()[1]
    assert said in message
