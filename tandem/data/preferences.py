"""Preferences from a file: of two continuations of one prompt, the chosen and the rejected one.

A row holds `prompt`, `chosen` and `rejected`, or `chosen` and `rejected` as whole chats whose
common start is the prompt (docs/data.md). Does not know tokens, chat templates or losses.
"""

from dataclasses import dataclass
from typing import Any

from tandem.data.messages import chat_messages
from tandem.data.readers.row_errors import RowError, show
from tandem.data.readers.rows import Row, column, read_rows
from tandem.types import Message

Messages = tuple[Message, ...]


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


def read_preferences(path: str, *, key: str) -> list[Preference]:
    """The preferences of a JSONL or Parquet file, in file order.

    key: the config key that names the file, e.g. "preference.train". Raises UserError with up to
    ten mistakes.
    """
    return read_rows(path, _preference, key=key)


def _preference(row: Row) -> Preference:
    chosen = column(row, "chosen", rename="rename {} to chosen")
    rejected = column(row, "rejected", rename="rename {} to rejected")
    if row.values.get("prompt") is None and not isinstance(chosen, str):
        whole = _messages(chosen, field="chosen"), _messages(rejected, field="rejected")
        prompt = _common_prompt(*whole)
        chosen, rejected = (chat[len(prompt) :] for chat in whole)
    else:
        prompt = _prompt(column(row, "prompt", rename="rename {} to prompt"))
        chosen = _continuation(chosen, prompt, field="chosen")
        rejected = _continuation(rejected, prompt, field="rejected")
    if chosen == rejected:
        raise RowError(
            "the same as chosen",
            "another continuation than chosen",
            field="rejected",
            next="remove the row",
        )
    return Preference(prompt=prompt, chosen=chosen, rejected=rejected)


def _prompt(value: Any) -> Messages:
    """The prompt column: the user's text, or messages."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RowError(show(value), "text, or a list of messages {role, content}", field="prompt")
    prompt = chat_messages(value, field="prompt")
    if prompt[-1]["role"] == "assistant":
        raise RowError(
            "a last message from 'assistant'", "a prompt that the assistant answers", field="prompt"
        )
    if not prompt[-1]["content"].strip():
        raise RowError("an empty message", "a message with text", field="prompt")
    return _asked(prompt, field="prompt")


def _continuation(value: Any, prompt: Messages, *, field: str) -> Messages:
    """What follows the prompt: the assistant's text, messages, or messages of which the prompt is
    the start."""
    if not isinstance(value, str | list):
        raise RowError(
            show(value), "the assistant's text, or a list of messages {role, content}", field=field
        )
    messages = _messages(
        [{"role": "assistant", "content": value}] if isinstance(value, str) else value, field=field
    )
    if messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if messages[0]["role"] != "assistant":
        found = f"a first message from {messages[0]['role']!r} that is not the prompt's"
        raise RowError(
            found,
            "the assistant's message, or a whole chat that starts with the prompt",
            field=field,
        )
    return messages


def _messages(value: Any, *, field: str) -> Messages:
    """Messages that end with something that the assistant says."""
    messages = chat_messages(value, field=field)
    if messages[-1]["role"] != "assistant":
        found = f"a last message from {messages[-1]['role']!r}"
        raise RowError(found, "messages that end with the assistant's", field=field)
    if not messages[-1]["content"].strip():
        raise RowError("an empty last message", "a message with text", field=field)
    return messages


def _common_prompt(chosen: Messages, rejected: Messages) -> Messages:
    """The longest common start of two chats that the assistant goes on from in both."""
    shorter = min(len(chosen), len(rejected))
    # messages in common
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
        found = f"no common prompt: message {place + 1} is {first} in chosen, {second} in rejected"
        expected = "two chats with the same messages up to one of the assistant's"
        raise RowError(
            found,
            expected,
            field="rejected",
            next="name the prompt in a column prompt, or remove the row",
        )
    return _asked(chosen[: starts[-1]], field="chosen")


def _answered(chat: Messages, i: int) -> bool:
    return chat[i]["role"] == "assistant" != chat[i - 1]["role"]


def _asked(prompt: Messages, *, field: str) -> Messages:
    """The prompt, if a user asks in it before the assistant speaks."""
    roles = [message["role"] for message in (*prompt, {"role": "assistant"})]
    if "user" not in roles[: roles.index("assistant")]:
        raise RowError(
            "an assistant's message before any user's", "a user's message first", field=field
        )
    return prompt
