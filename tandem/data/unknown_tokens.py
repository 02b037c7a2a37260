"""Text that a tokenizer has no tokens for: the model reads `<unk>` in its place, and only a warning
tells.

Knows texts and their tokens. Does not know chats, files or chat templates.
"""

import logging
from collections.abc import Sequence
from typing import Any

from tandem.types import Array

logger = logging.getLogger(__name__)

EXAMPLES, SHOWN = 20, 5  # texts kept for the warning, and characters that it names


class UnknownTokens:
    """Count of the texts that have unknown tokens.

    A tokenizer without an unknown token knows every byte. So does one whose unknown token is an end
    or a beginning of texts as well (GPT-2).
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._seen, self._found = tokenizer, 0, 0
        ends = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._unknown = None if tokenizer.unk_token_id in ends else tokenizer.unk_token_id
        self._texts: list[str] = []  # the first with unknown tokens

    def look(self, texts: Sequence[str], rows: Sequence[Array]) -> None:
        """Count the texts; rows are their tokens, int64 [T] each."""
        self._seen += len(rows)
        for text, row in zip(texts, rows, strict=True):
            if self._unknown is not None and (row == self._unknown).any():
                self._found += 1
                self._texts += [text] * (len(self._texts) < EXAMPLES)

    def warn(self, unit: str, key: str) -> None:
        """Warn of the texts that were counted. unit: what they are, of the data behind the key."""
        if not self._texts:
            return
        found = self._characters()
        more = " and others" * (len(found) > SHOWN)
        logger.warning(
            "%s of %s %s of %s have text that the tokenizer does not know%s: the model reads %s in "
            "its place. Take another model, or a tiny one made for these data "
            "(tandem tiny DIR --from FILE)",
            f"{self._found:,}",
            f"{self._seen:,}",
            unit,
            key,
            f" ({', '.join(map(repr, found[:SHOWN]))}{more})" if found else "",
            self._tokenizer.unk_token,
        )

    def _characters(self) -> list[str]:
        """Return what the unknown tokens of the first texts stand for."""
        if not self._tokenizer.is_fast:  # only a fast one tells the place of a token
            return []
        read = self._tokenizer(
            self._texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        pieces = (
            text[start:end][:20]
            for text, row, places in zip(
                self._texts, read["input_ids"], read["offset_mapping"], strict=True
            )
            for token, (start, end) in zip(row, places, strict=True)
            if token == self._unknown
        )
        return list(dict.fromkeys(pieces))
