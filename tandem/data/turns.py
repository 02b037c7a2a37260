"""Chats by turns, and where two renderings of them part."""

from collections.abc import Sequence

import numpy as np

from tandem.types import Array, Message


def prefixes(messages: Sequence[Message], turns: list[int]) -> list[tuple[Sequence[Message], bool]]:
    """Return the chat up to the header of each of the assistant's turns and up to its end; then the
    whole chat."""
    found = [(messages[: i + ended], not ended) for i in turns for ended in (False, True)]
    return found if messages[-1]["role"] == "assistant" else [*found, (messages, False)]


def assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def first_difference(a: Array, b: Array) -> int:
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
