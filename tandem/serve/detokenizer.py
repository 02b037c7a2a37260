"""The text of a completion while it grows: the part that may be sent now.

That part never ends in half a character or in the beginning of a stop string, so the final text
starts with all that was sent. A window of tokens is decoded, not the whole. Does not know requests.
"""

from collections.abc import Callable, Sequence

import numpy as np

from tandem.engine.ending import REPLACEMENT
from tandem.types import Array


class Detokenizer:
    """Decoder of one completion's tokens into pieces of text.

    decode: token ids int64 [T] -> text; byte_tokens: tokens of one byte of a character. Decoders
    read a whole run of byte tokens at once, so their text is held back until the run ends.
    """

    def __init__(
        self, decode: Callable[[Array], str], stop: Sequence[str], byte_tokens: frozenset[int]
    ):
        self._decode, self._stop, self._byte_tokens = decode, stop, byte_tokens
        self._tokens: list[int] = []
        # tokens[start:read] are sent, and show how the next ones join on
        self._start = self._read = 0
        self._pending = ""  # complete text that could be the beginning of a stop string
        self._sent = 0  # characters

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that may be sent after these tokens of a running completion."""
        self._tokens += tokens
        self._pending += self._complete()
        size = len(self._pending) - max(
            (overlap(self._pending, stop) for stop in self._stop), default=0
        )
        text, self._pending = self._pending[:size], self._pending[size:]
        self._sent += len(text)
        return text

    def end(self, text: str) -> str:
        """Return the rest of a completion's text."""
        return text[self._sent :]

    def _complete(self) -> str:
        """Decode the whole characters since the last call."""
        if self._byte_tokens and self._in_byte_run():
            return ""
        before = self._decode(np.array(self._tokens[self._start : self._read], np.int64))
        text = self._decode(np.array(self._tokens[self._start :], np.int64))
        if len(text) <= len(before) or text.endswith(REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return text[len(before) :]

    def _in_byte_run(self) -> bool:
        """Tell whether the last token leaves a run of byte tokens open. One without text, such as a
        special one, never reaches the decoder and ends no run."""
        last = self._tokens[-1]
        return last in self._byte_tokens or not self._decode(np.array([last], np.int64))


def overlap(text: str, stop: str) -> int:
    """Measure the longest end of text that begins stop and is shorter than it."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
