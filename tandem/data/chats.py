"""Chats for supervised fine-tuning, from a file.

A row holds `messages`, or a `prompt` (text or messages) and a `response`. Does not know tokens or chat templates: what
carries loss is decided in render.py.
"""

from typing import Any

from tandem.data.messages import chat_messages, prompt_messages
from tandem.data.mistakes import RowError, show
from tandem.data.rows import Row, column, read_rows
from tandem.types import Message


def read_chats(path: str, *, key: str) -> list[tuple[Message, ...]]:
    """The chats of a JSONL or Parquet file, in file order; each ends with the assistant's message.

    key: the config key that names the file, e.g. "sft.train". Raises UserError with up to ten mistakes.
    """
    return read_rows(path, _chat, key=key)


def _chat(row: Row) -> tuple[Message, ...]:
    # `messages` wins over `prompt`: data sets with both keep the whole chat in `messages`.
    if row.values.get("messages") is not None:
        return _whole_chat(row.values["messages"])
    if "prompt" not in row.values:
        column(row, "messages", rename="rename {} to messages")
    prompt = prompt_messages(column(row, "prompt", rename="rename {} to prompt"), field="prompt")
    response = column(row, "response", rename="rename {} to response")
    if not isinstance(response, str) or not response:
        raise RowError("empty text" if response == "" else show(response), "the assistant's text", field="response")
    return (*prompt, {"role": "assistant", "content": response})


def _whole_chat(value: Any) -> tuple[Message, ...]:
    messages = chat_messages(value, field="messages")
    roles = [message["role"] for message in messages]
    if roles[-1] != "assistant":
        found = f"a last message from {roles[-1]!r}"
        raise RowError(found, "a chat that ends with the assistant's message", field="messages")
    if "user" not in roles[: roles.index("assistant")]:
        raise RowError("an assistant's message before any user's", "a user's message first", field="messages")
    return messages
