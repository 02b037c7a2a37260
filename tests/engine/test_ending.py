"""Stop strings found in the last tokens' text against those found in the whole, and how much is
decoded for it."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.ending import find_ending
from tandem.types import SamplingParams
from tests.support.decoders import BYTES, DECODERS, FALLBACK_TOKENS

STOPS = st.lists(st.text("aé€🦀\ufffd de", min_size=1, max_size=3), min_size=1, max_size=2)


def first_ending(kind, tokens, stop):
    """The number of tokens at which a completion ends, and its text and reason."""
    decode, _ = DECODERS[kind]
    params = SamplingParams(max_new_tokens=len(tokens), stop=tuple(stop))
    endings = ((n, find_ending(params, tokens[:n], 0, decode)) for n in range(1, len(tokens) + 1))
    return next((n, *ending) for n, ending in endings if ending)


def first_ending_by_the_whole_text(kind, tokens, stop):
    decode, _ = DECODERS[kind]
    for n in range(1, len(tokens) + 1):
        text = decode(np.array(tokens[:n]))
        cuts = [text.index(s) for s in stop if s in text]
        if cuts or n == len(tokens):
            return (n, text[: min(cuts)], "stop") if cuts else (n, text, "length")


@settings(max_examples=300)
@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data())
def test_stop_strings_end_a_completion_where_they_first_come(kind, data):
    parts = data.draw(BYTES if kind == "byte level" else FALLBACK_TOKENS)
    # after a text that is longer than the window of last tokens
    tokens = [97 if kind == "byte level" else 2] * 12 + list(chain(*parts))
    stop = data.draw(STOPS)
    assert first_ending(kind, tokens, stop) == first_ending_by_the_whole_text(kind, tokens, stop)


@pytest.mark.parametrize("stop", ["..", ".b", "a.", "..."])
def test_a_stop_string_within_a_token_or_across_two_ends_the_text_before_it(stop):
    """The token stays whole among the tokens, as it was sampled; the text ends where the string
    begins."""
    words = {0: "xy", 1: "a...b", 2: "c"}

    def decode(tokens):
        return "".join(words[token] for token in tokens.tolist())

    params = SamplingParams(max_new_tokens=40, stop=(stop, "yz"))
    ends = [find_ending(params, [0] * 9 + [2, 1][: n + 1], 0, decode) for n in range(2)]
    assert ends == [None, (("xy" * 9 + "ca...b").partition(stop)[0], "stop")]


@pytest.mark.parametrize(
    "decode, before, tokens, stop",
    [
        (lambda tokens: bytes(tokens.tolist()).decode(errors="ignore"), 97, "é".encode(), "é"),
        (DECODERS["byte fallback"][0], 2, [6 + 0xE2, 6 + 0x61], "\ufffd\ufffd"),
    ],
)
def test_a_token_may_end_a_stop_string_that_is_not_in_its_own_text(decode, before, tokens, stop):
    """A byte of a character that a decoder leaves out, and a letter among broken bytes."""
    params = SamplingParams(max_new_tokens=40, stop=(stop,))
    ends = [find_ending(params, [before] * 12 + [*tokens[:n]], 0, decode) for n in (1, 2)]
    assert ends == [None, (decode(np.array([before] * 12)), "stop")]


@pytest.mark.parametrize("stop, most", [("STOP", 1.1), ("STOb", 6)])
def test_a_long_completion_is_not_decoded_again_at_each_token(stop, most):
    """A token without the last character of the stop string is decoded once."""
    decoded = 0

    def decode(tokens):
        nonlocal decoded
        decoded += len(tokens)
        return bytes(tokens.tolist()).decode(errors="replace")

    params = SamplingParams(max_new_tokens=4000, stop=(stop,))
    tokens = [*b"ab " * 1000, *stop.encode()]
    endings = [find_ending(params, tokens[: n + 1], 0, decode) for n in range(len(tokens))]
    assert endings == [None] * 3003 + [("ab " * 1000, "stop")]
    assert decoded < most * len(tokens)
