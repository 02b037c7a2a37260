"""Chats for supervised fine-tuning, from a file.

A row holds `messages`, or a `prompt` (text or messages) and a `response`; or it is written as
TRL's, ShareGPT's and Alpaca's data sets are (docs/data.md). Does not know tokens or chat templates:
what carries loss is decided in render.py.
"""

from tandem.data.messages import chat_messages, prompt_messages
from tandem.data.readers.row_errors import RowError, show
from tandem.data.readers.rows import Row, column, read_rows
from tandem.types import Message


def read_chats(path: str, *, key: str) -> list[tuple[Message, ...]]:
    """The chats of a JSONL or Parquet file, in file order; each ends with the assistant's message.

    key: the config key that names the file, e.g. "sft.train". Raises UserError with up to ten
    mistakes.
    """
    return read_rows(path, _chat, key=key)


def _chat(row: Row) -> tuple[Message, ...]:
    # `messages` wins over `prompt`: data sets with both keep the whole chat in `messages`.
    for name in ("messages", "conversations"):
        if row.values.get(name) is not None:
            return _whole_chat(chat_messages(row.values[name], field=name), field=name)
    if row.values.keys() >= {"instruction", "output"}:
        asked, answer = _instruction(row), "output"
    else:
        if "prompt" not in row.values:
            column(row, "messages", rename="rename {} to messages")
        asked = column(row, "prompt", rename="rename {} to prompt")
        answer = "completion" if row.values.get("completion") is not None else "response"
    prompt = prompt_messages(asked, field="prompt")
    response = column(row, answer, rename="rename {} to response")
    if isinstance(response, list):
        return _whole_chat((*prompt, *chat_messages(response, field=answer)), field=answer)
    if not isinstance(response, str) or not response:
        raise RowError(
            "empty text" if response == "" else show(response), "the assistant's text", field=answer
        )
    return (*prompt, {"role": "assistant", "content": response})


def _instruction(row: Row) -> str:
    """Alpaca's prompt: the instruction, and behind an empty line its input."""
    parts = [row.values["instruction"], row.values.get("input") or ""]
    if not all(isinstance(part, str) for part in parts):
        raise RowError(show(parts), "text", field="instruction and input")
    return "\n\n".join(part for part in parts if part)


def _whole_chat(messages: tuple[Message, ...], *, field: str) -> tuple[Message, ...]:
    roles = [message["role"] for message in messages]
    if roles[-1] != "assistant":
        found = f"a last message from {roles[-1]!r}"
        raise RowError(found, "a chat that ends with the assistant's message", field=field)
    if "user" not in roles[: roles.index("assistant")]:
        raise RowError(
            "an assistant's message before any user's", "a user's message first", field=field
        )
    return messages
