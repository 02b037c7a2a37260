"""Text streamed before a call: the beginning of the content that is read at the end."""

import random

import pytest

from tandem.model.tool_calls import Call, split_calls
from tandem.serve.tool_stream import ToolStream
from tests.support.tool_calls import STYLES, write_in_style

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALLS = [write_in_style([Call(name="add", arguments={"a": 1})], style) for style in STYLES]
PIECES = [
    *CALLS,
    "<think>",
    "</think>",
    "</thi",
    "nk>",
    "<tool_",
    "call>",
    "<tool_call>{",
    "[",
    "{",
]
PIECES += ["</tool_call>", "[TOOL_CALLS]", " \n", "\n\n", "Hi", " there.", "<", '{"name": "x"}']


def test_sent_text_begins_the_content_of_any_answer():
    rng, sent, called = random.Random(0), 0, 0
    for _ in range(5_000):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 6)))
        content, calls = split_calls(text, TOOLS)
        stream, at = ToolStream(), 0
        while at < len(text):
            size = rng.randint(1, 9)
            stream.add(text[at : at + size])
            at += size
        assert content.startswith(stream.sent) and text.startswith(stream.sent), text
        sent, called = sent + len(stream.sent), called + bool(calls)
    assert sent > 10_000 and called > 500


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("It is 42. Well: {}", "It is 42. Well: {}"),
        ("I see.\n<tool_call>", "I see."),
        ("I see.\n<tool_pot> is no call", "I see.\n<tool_pot> is no call"),
        ("<think>{ a </think>\n\n42", "<think>{ a </think>\n\n42"),
        ('<think>hm</think>\n\n{"name"', "<think>hm</think>"),
        ('{"name": "add"', ""),
        ("\nHi", ""),
    ],
)
def test_text_is_held_back_from_where_a_call_may_begin(text, sent):
    for size in (1, 3, 100):
        stream = ToolStream()
        parts = [stream.add(text[at : at + size]) for at in range(0, len(text), size)]
        assert "".join(parts) == stream.sent == sent
