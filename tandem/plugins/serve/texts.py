"""Texts to tokens and back, as the server needs them.

Knows no requests and no engine.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.data.renderer import ChatRenderer
from tandem.types import Array, Message, Tool


class RendererTexts:
    """The tokenizer and the chat template of a renderer. byte_tokens: see Detokenizer."""

    def __init__(self, renderer: ChatRenderer):
        self.tokenizer: Any = renderer.tokenizer
        self.stop_token_ids, self.vocabulary = renderer.stop_token_ids, renderer.vocabulary
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        self.byte_tokens = frozenset(
            i for token, i in vocabulary.items() if re.fullmatch(r"<0x[0-9A-F]{2}>", token)
        )
        self._renderer = renderer
        self._texts: dict[int, str] = {}

    def encode(self, text: str) -> Array:
        """Encode plain text as int64 [T], with the begin-of-text token if the tokenizer writes
        one, and once if the text begins with it too."""
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        twice = ids[:2] == [self.tokenizer.bos_token_id] * 2
        return np.array(ids[twice:], np.int64)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: dict[str, Any]
    ) -> str:
        return self._renderer.texts([messages], True, tools, variables)[0]

    def encode_chat(self, text: str) -> Array:
        return self._renderer.encode(text)

    def decode(self, tokens: Array) -> str:
        return self._renderer.decode(tokens)

    def token_text(self, token: int) -> str:
        """Decode one token, special ones too, as inside a text: a leading space is kept."""
        if token not in self._texts:
            once, twice = (
                self.tokenizer.decode([token] * n, clean_up_tokenization_spaces=False)
                for n in (1, 2)
            )
            self._texts[token] = twice[len(once) :]
        return self._texts[token]
