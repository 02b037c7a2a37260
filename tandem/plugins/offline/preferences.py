"""Rows of preferences: read_rows(path, parse_preference, key="preference.train").

A row holds `prompt`, `chosen` and `rejected`, or `chosen` and `rejected` as whole chats whose
common start is the prompt (docs/guide/data.md). Does not know tokens, chat templates or losses.
"""

from dataclasses import dataclass
from typing import Any

from tandem.data.messages import chat_messages, prompt_messages, require_user_first
from tandem.data.prompt_columns import with_opening
from tandem.data.readers import Row, RowError, column, show
from tandem.runtime.image_parts import image_column
from tandem.types import Message

Messages = tuple[Message, ...]

FITS = 'write a row as {"prompt": "1 + 1 =", "chosen": "2", "rejected": "3"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A prompt and two continuations that differ; prompt + chosen and prompt + rejected are whole
    chats.

    Example: Preference(prompt=({"role": "user", "content": "1 + 1 ="},), chosen=({"role":
    "assistant", "content": "2"},), rejected=({"role": "assistant", "content": "3"},))
    """

    prompt: Messages  # holds a user's message, and ends with a message that is not the assistant's
    chosen: Messages  # starts and ends with the assistant's messages; mostly one
    rejected: Messages  # likewise


def parse_preference(row: Row) -> Preference:
    """Return the row's preference. Raises RowError."""
    chosen = column(row, "chosen", rename="rename {} to chosen", otherwise=FITS)
    rejected = column(row, "rejected", rename="rename {} to rejected", otherwise=FITS)
    if name := image_column(row.values):
        raise RowError("images", "a pair of texts", field=name, next="leave the column out")
    if row.values.get("prompt") is None and not isinstance(chosen, str):
        chats = _messages(chosen, field="chosen"), _messages(rejected, field="rejected")
        prompt = _common_prompt(*chats)
        chosen, rejected = (chat[len(prompt) :] for chat in chats)
    else:
        prompt = column(row, "prompt", rename="rename {} to prompt")
        prompt = prompt_messages(prompt, field="prompt", images=False, tools=True)
        require_user_first((*prompt, {"role": "assistant"}), field="prompt")
        chosen = _continuation(chosen, prompt, field="chosen")
        rejected = _continuation(rejected, prompt, field="rejected")
    if chosen == rejected:
        raise RowError(
            "the same as chosen",
            "another continuation than chosen",
            field="rejected",
            next="remove the row",
        )
    return Preference(prompt=with_opening(prompt, row), chosen=chosen, rejected=rejected)


def _continuation(value: Any, prompt: Messages, *, field: str) -> Messages:
    """Read the continuation of the prompt: the assistant's text, or messages, which may begin with
    the prompt."""
    if isinstance(value, str):
        value = [{"role": "assistant", "content": value}]
    if not isinstance(value, list):
        expected = "the assistant's text, or a list of messages {role, content}"
        raise RowError(show(value), expected, field=field)
    messages = _messages(value, field=field)
    if messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if messages[0]["role"] != "assistant":
        found = f"a first message from {messages[0]['role']!r} that is not the prompt's"
        expected = "the assistant's message, or a whole chat that starts with the prompt"
        raise RowError(found, expected, field=field)
    return messages


def _messages(value: Any, *, field: str) -> Messages:
    """Read messages that end with a text of the assistant."""
    messages = chat_messages(value, field=field)
    if messages[-1]["role"] != "assistant":
        found = f"a last message from {messages[-1]['role']!r}"
        raise RowError(found, "messages that end with the assistant's", field=field)
    if not (messages[-1]["content"].strip() or "tool_calls" in messages[-1]):
        raise RowError("an empty last message", "a message with text", field=field)
    return messages


def _common_prompt(chosen: Messages, rejected: Messages) -> Messages:
    """Return the longest common start of two chats that the assistant continues in both."""
    shorter = min(len(chosen), len(rejected))
    same = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
    starts = [
        i
        for i in range(1, min(same + 1, shorter))
        if _answered(chosen, i) and _answered(rejected, i)
    ]
    if not starts:
        place = min(same, shorter - 1)
        first, second = (
            f"{show(chat[place]['content'])} from {chat[place]['role']!r}"
            for chat in (chosen, rejected)
        )
        raise RowError(
            f"no common prompt: message {place + 1} is {first} in chosen, {second} in rejected",
            "two chats with the same messages up to one of the assistant's",
            field="rejected",
            next="name the prompt in a column prompt, or remove the row",
        )
    require_user_first(chosen, field="chosen")
    return chosen[: starts[-1]]


def _answered(chat: Messages, i: int) -> bool:
    return chat[i]["role"] == "assistant" != chat[i - 1]["role"]
