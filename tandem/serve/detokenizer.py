"""The text of a completion while it grows: what may be sent of it now.

Never half a character, and never a beginning of a stop string: all that is sent stands at the start
of the final text. Decodes a window of tokens, not the whole. Does not know requests.
"""

from collections.abc import Callable, Sequence

import numpy as np

from tandem.types import Array

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character yet


class Detokenizer:
    """decode turns token ids int64 [T] into text; byte_tokens are those that stand for one byte of
    a character.

    A decoder with byte tokens looks at a whole run of them at once, so their text is kept until the
    run ends.
    """

    def __init__(
        self, decode: Callable[[Array], str], stop: Sequence[str], byte_tokens: frozenset[int]
    ):
        self._decode, self._stop, self._byte_tokens = decode, stop, byte_tokens
        self._tokens: list[int] = []
        # tokens[start:read] are sent, and show how the next ones join on
        self._start = self._read = 0
        self._held = ""  # complete text that could be the beginning of a stop string
        self._sent = 0  # characters

    def add(self, tokens: Sequence[int]) -> str:
        """The text that the tokens of a running completion allow to send."""
        self._tokens += tokens
        self._held += self._complete()
        size = len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[:size], self._held[size:]
        self._sent += len(text)
        return text

    def end(self, text: str) -> str:
        """What is left to send of a completion's text."""
        return text[self._sent :]

    def _complete(self) -> str:
        """The text of whole characters that came since the last call."""
        if self._byte_tokens and self._in_byte_run():
            return ""
        before = self._decode(np.array(self._tokens[self._start : self._read], np.int64))
        text = self._decode(np.array(self._tokens[self._start :], np.int64))
        if len(text) <= len(before) or text.endswith(REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return text[len(before) :]

    def _in_byte_run(self) -> bool:
        """A token without text, such as a special one, is left out before the decoder sees the run,
        so it ends none."""
        last = self._tokens[-1]
        return last in self._byte_tokens or not self._decode(np.array([last], np.int64))


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of text that is a beginning of stop, and not all of it."""
    return next(
        (
            size
            for size in range(min(len(text), len(stop) - 1), 0, -1)
            if text.endswith(stop[:size])
        ),
        0,
    )
