"""Text sent while it grows against the whole text, with the two kinds of decoder that models
have; before a call, the beginning of the content that is read at the end."""

import random
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.ending import REPLACEMENT
from tandem.model.tool_calls import Call, split_calls
from tandem.plugins.serve.detokenizer import Detokenizer, ToolStream
from tests.support.decoders import BYTES, DECODERS, FALLBACK_TOKENS
from tests.support.tool_calls import STYLES, write_in_style


def check(kind, tokens, stop=()):
    """Feed the tokens one by one as an engine does, ending at a stop string or with the last
    token."""
    decode, byte_tokens = DECODERS[kind]
    detokenizer, sent = Detokenizer(decode, stop, byte_tokens), []
    for count in range(1, len(tokens) + 1):
        text = decode(np.array(tokens[:count]))
        cuts = [text.index(s) for s in stop if s in text]
        if cuts or count == len(tokens):
            text = text[: min(cuts)] if cuts else text
            sent.append(detokenizer.end(text))
            break
        sent.append(detokenizer.add([tokens[count - 1]]))
        assert text.startswith("".join(sent))
        assert not sent[-1].endswith(REPLACEMENT)
    else:
        text = ""
    assert "".join(sent) == text
    return sent


@settings(max_examples=100, deadline=None)
@given(BYTES)
def test_pieces_of_byte_tokens_join_to_the_whole_text(tokens):
    check("byte level", list(chain(*tokens)))


@settings(max_examples=100, deadline=None)
@given(FALLBACK_TOKENS)
def test_pieces_with_byte_fallback_join_to_the_whole_text(tokens):
    check("byte fallback", list(chain(*tokens)))


@settings(max_examples=100, deadline=None)
@given(st.text("ab"), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_pieces_hold_no_part_of_a_stop_string(text, stop):
    check("byte level", list(text.encode()), stop)


@pytest.mark.parametrize(
    ("text", "stop", "sent"),
    [
        ("héé", (), ["h", "", "é", "", "é"]),
        ("a🦀b", (), ["a", "", "", "", "🦀", "b"]),
        ("xSTOx", ("STOP",), ["x", "", "", "", "STOx"]),
        ("xSTOPy", ("STOP",), ["x", "", "", "", ""]),
        ("SSTOP", ("STOP", "SSS"), ["", "", "S", "", ""]),
    ],
)
def test_text_is_sent_as_soon_as_it_is_sure(text, stop, sent):
    assert check("byte level", list(text.encode()), stop) == sent


def test_a_long_text_is_not_decoded_again_and_again():
    longest = 0

    def decode(tokens):
        nonlocal longest
        longest = max(longest, len(tokens))
        return bytes(tokens.tolist()).decode(errors="replace")

    detokenizer = Detokenizer(decode, (), frozenset())
    assert "".join(detokenizer.add([byte]) for byte in "é€a".encode() * 500) == "é€a" * 500
    assert longest <= 8


# ---- with tools

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALLS = [write_in_style([Call(name="add", arguments={"a": 1})], style) for style in STYLES]
PIECES = [*CALLS, "<think>", "</think>", "</thi", "nk>", "<tool_", "call>", "<tool_call>{"]
PIECES += ["[", "{", "</tool_call>", "[TOOL_CALLS]", " \n", "\n\n", "Hi", " there.", "<"]
PIECES.append('{"name": "x"}')


def test_sent_text_begins_the_content_of_any_answer():
    rng, sent, called = random.Random(0), 0, 0
    for _ in range(2_000):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 6)))
        content, calls = split_calls(text, TOOLS)
        stream, at = ToolStream(), 0
        while at < len(text):
            size = rng.randint(1, 9)
            stream.add(text[at : at + size])
            at += size
        assert content.startswith(stream.sent) and text.startswith(stream.sent), text
        sent, called = sent + len(stream.sent), called + bool(calls)
    assert sent > 4_000 and called > 200


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
