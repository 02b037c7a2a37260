"""The text of a completion while it grows: the part that may be sent now.

That part never ends in half a character or in the beginning of a stop string, so the final text
starts with all that was sent. A window of tokens is decoded, not the whole. Does not know requests.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from tandem.engine.ending import REPLACEMENT
from tandem.model.tool_calls import MARKERS
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
        last = self._tokens[-1]
        # A token without text, such as a special one, never reaches the decoder and ends no run.
        if self._byte_tokens and (
            last in self._byte_tokens or not self._decode(np.array([last], np.int64))
        ):
            return ""
        before = self._decode(np.array(self._tokens[self._start : self._read], np.int64))
        text = self._decode(np.array(self._tokens[self._start :], np.int64))
        if len(text) <= len(before) or text.endswith(REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return text[len(before) :]


def overlap(text: str, stop: str) -> int:
    """Measure the longest end of text that begins stop and is shorter than it."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


# ---------------------------------------------------------------- with tools

END_OF_THOUGHTS = "</think>"
_BARE = ("{", "[")  # how a call without a marker begins a line, or follows its thoughts


class ToolStream:
    """The part of an answer with tools that is content whatever follows.

    A call is read once its turn is whole (model/tool_calls.py). Content before it goes out at once:
    up to the first marker of a call, or what may become one, and without the white space there,
    which a call would strip.
    """

    def __init__(self) -> None:
        self.sent = ""
        self._rest, self._held = "", False  # text behind it; whether a call may have begun there

    def add(self, text: str) -> str:
        """Return what may be sent after some more text."""
        self._rest += text
        # white space before everything would be stripped too
        if self._held or (not self.sent and self._rest[:1].isspace()):
            return ""
        new = self._rest[: self._end()].rstrip()
        self.sent, self._rest = self.sent + new, self._rest[len(new) :]
        return new

    def _end(self) -> int:
        """Find where a call may begin in the rest."""
        rest = self._rest
        spoken = [found.end() for found in re.finditer(f"{END_OF_THOUGHTS}|\n", rest)]
        if not self.sent or self.sent.endswith(END_OF_THOUGHTS):
            spoken.append(0)
        ends = [rest.index(marker) for marker in MARKERS if marker in rest]
        ends += [start for start in spoken if rest[start:].lstrip().startswith(_BARE)]
        self._held = bool(ends)
        partial = max(overlap(rest, marker) for marker in (*MARKERS, END_OF_THOUGHTS))
        return min(ends, default=len(rest) - partial)
