"""The text of an answer with tools while it grows: the part that is content whatever follows.

A call is read once its turn is whole (model/tool_calls.py). Content before it goes out at once: up
to the first marker of a call, or what may become one, and without the white space there, which a
call would strip. What was sent is the beginning of the content in any case.
"""

import re

from tandem.model.tool_calls import CLOSE, MISTRAL_TAG, OPEN, PYTHON_TAG
from tandem.serve.detokenizer import overlap

MARKERS = (OPEN, CLOSE, PYTHON_TAG, MISTRAL_TAG)
END_OF_THOUGHTS = "</think>"
_BARE = ("{", "[")  # how a call without a marker begins a turn, or follows its thoughts


class ToolStream:
    """The content of one choice that may be sent."""

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
        rest, spoken = self._rest, [m.end() for m in re.finditer(END_OF_THOUGHTS, self._rest)]
        if not self.sent or self.sent.endswith(END_OF_THOUGHTS):
            spoken.append(0)
        ends = [rest.index(marker) for marker in MARKERS if marker in rest]
        ends += [start for start in spoken if rest[start:].lstrip().startswith(_BARE)]
        self._held = bool(ends)
        partial = max(overlap(rest, marker) for marker in (*MARKERS, END_OF_THOUGHTS))
        return min(ends, default=len(rest) - partial)
