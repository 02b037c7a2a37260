"""Text sent while it grows against the whole text, with the two kinds of decoder that models
have."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.ending import REPLACEMENT
from tandem.serve.detokenizer import Detokenizer
from tests.support.decoders import BYTES, DECODERS, FALLBACK_TOKENS


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


@settings(max_examples=300, deadline=None)
@given(BYTES)
def test_pieces_of_byte_tokens_join_to_the_whole_text(tokens):
    check("byte level", list(chain(*tokens)))


@settings(max_examples=300, deadline=None)
@given(FALLBACK_TOKENS)
def test_pieces_with_byte_fallback_join_to_the_whole_text(tokens):
    check("byte fallback", list(chain(*tokens)))


@settings(max_examples=300, deadline=None)
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
