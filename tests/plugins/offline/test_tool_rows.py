"""Rows with tool calls, in the forms of public data sets."""

import json

import numpy as np
import pytest

from tandem.data.readers import Row, read_rows
from tandem.plugins.offline.loss_mask import training_samples
from tandem.plugins.offline.rows import parse_chat, parse_preference, template_inputs
from tandem.runtime.errors import UserError
from tests.support.call_templates import call_templates, template_renderer
from tests.support.datasets import jsonl, parquet

SCHEMA = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "a"}}},
}
TOOLS = [{"type": "function", "function": SCHEMA}]
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"strict": True}}}
USER = {"role": "user", "content": "1 + 1 ="}
DONE = {"role": "assistant", "content": "2"}
RESULT = {"role": "tool", "content": "2"}


def call(arguments, **more):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}, **more}


def turn(*calls, content=""):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def read(row, parse=parse_chat):
    return parse(Row(number=1, values=row, line=""))


ONE = (USER, turn(call({"a": 1})), RESULT, DONE)
FORMS = {
    "OpenAI": {"messages": [USER, turn(call('{"a": 1}'), content=None), RESULT, DONE]},
    "objects": {"messages": [USER, turn(call({"a": 1, "b": None})), RESULT, DONE]},
    "bare": {"messages": [USER, turn({"name": "add", "arguments": {"a": 1}}), RESULT, DONE]},
    "function_call": {
        "messages": [
            USER,
            {"role": "assistant", "function_call": {"name": "add", "arguments": '{"a": 1}'}},
            {**RESULT, "role": "function"},
            DONE,
        ]
    },
    "APIGen-MT": {
        "conversations": [
            {"from": "human", "value": "1 + 1 ="},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "2"},
        ]
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read_in_the_forms_of_public_data(form):
    assert read(FORMS[form]) == ONE


def test_rows_of_xlam_are_a_question_and_its_calls():
    answers = [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]
    row = {"query": "?", "tools": json.dumps([SCHEMA]), "answers": json.dumps(answers)}
    assert read(row) == ({"role": "user", "content": "?"}, turn(call({"a": 1}), call({"a": 2})))
    assert read(row, template_inputs).tools == TOOLS


def test_nulls_that_a_table_pads_are_left_out(tmp_path):
    rows = [
        {"messages": [USER, turn(call({"a": 1})), DONE], "tools": TOOLS},
        {"messages": [USER, turn(call({"b": "x"})), DONE], "tools": [OTHER]},
    ]
    file = parquet(tmp_path / "rows.parquet", *rows)
    chats = read_rows(file, parse_chat, key="sft.train")
    assert [chat[1]["tool_calls"][0]["function"]["arguments"] for chat in chats] == [
        {"a": 1},
        {"b": "x"},
    ]
    assert [i.tools for i in read_rows(file, template_inputs, key="sft.train")] == [
        row["tools"] for row in rows
    ]


def test_a_pair_may_differ_in_its_calls():
    pair = read(
        {"prompt": [USER], "chosen": [turn(call({"a": 1}))], "rejected": [turn(call({"a": 2}))]},
        parse_preference,
    )
    assert pair.chosen != pair.rejected


@pytest.mark.parametrize(
    ("calls", "field", "said"),
    [
        ([1], "tool_calls[0]", "a call"),
        ([call("{")], "tool_calls[0].function.arguments", "an object, or its JSON"),
        ([call([1])], "tool_calls[0].function.arguments", "an object, or its JSON"),
        ([{"function": {}}], "tool_calls[0]", "a call"),
    ],
)
def test_a_call_that_cannot_be_read_is_named(tmp_path, calls, field, said):
    file = jsonl(tmp_path / "f.jsonl", {"messages": [USER, turn(*calls), DONE]})
    with pytest.raises(UserError) as caught:
        read_rows(file, parse_chat, key="sft.train")
    assert field in str(caught.value) and said in str(caught.value)


def test_a_turn_of_weight_0_carries_no_loss():
    renderer = template_renderer("qwen2_5", call_templates()["qwen2_5"])
    pairs = [(0, 1), (1, 0), (1, 1)]
    chats = [[USER, {**DONE, "weight": a}, USER, {**DONE, "weight": b}] for a, b in pairs]
    one, other, both = training_samples(renderer, [read({"messages": chat}) for chat in chats])
    assert one[0].tolist() == other[0].tolist() == both[0].tolist()
    assert (one[1] ^ other[1]).tolist() == both[1].tolist() and one[1].any() and other[1].any()


@pytest.mark.parametrize("name", ["qwen2_5", "gemma4_v5", "glm4moe", "lfm2_v2", "gptoss"])
def test_loss_is_on_the_calls_and_the_tokens_are_those_of_the_whole_chat(name):
    renderer = template_renderer(name, call_templates()[name])
    chat = (USER, turn(call({"a": 1}, id="call00001")), {**RESULT, "name": "add"}, DONE, USER, DONE)
    if name in ("glm4moe", "gptoss"):  # what ends its last turn is not written, or is rewritten
        chat = chat[:4] if name == "gptoss" else (*chat, USER)
    inputs = template_inputs(Row(number=1, values={"tools": TOOLS}, line=""))
    [(tokens, mask)] = training_samples(renderer, [chat], inputs=[inputs])
    [whole] = renderer.chats([chat], TOOLS)
    assert tokens.tolist() == whole.tolist()
    trained = renderer.tokenizer.decode(tokens[mask].tolist())
    assert "add" in trained and "1 + 1" not in trained
    ends = np.flatnonzero(mask[:-1] & ~mask[1:])
    assert all(tokens[end] in renderer.stop_token_ids for end in ends)
