"""Chat messages as rows of a file hold them.

Knows roles and text. Does not know files, nor which roles a model's chat template can write.
"""

from collections.abc import Sequence
from typing import Any

from tandem.data.readers.row_errors import RowError, show
from tandem.types import Message

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function": "tool"}


def prompt_messages(value: Any, *, field: str) -> tuple[Message, ...]:
    """Read a prompt: the user's text, or messages that end with the user's. Raises RowError."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RowError(
            show(value),
            "text, or a list of messages {role, content}",
            field=field,
            next='write the prompt as text: "..."',
        )
    messages = chat_messages(value, field=field)
    last = messages[-1]
    if last["role"] != "user":
        found = f"a last message from {last['role']!r}"
        raise RowError(found, "a prompt that ends with the user's message", field=field)
    if not last["content"].strip():
        raise RowError("an empty message", "a message with text", field=field)
    return messages


def chat_messages(value: Any, *, field: str) -> tuple[Message, ...]:
    """Read messages with a known role and text; keep other keys with text for the chat template.

    ShareGPT's {from, value} and OpenAI's content in parts of text are read, too. Raises RowError.
    """
    if not isinstance(value, list):
        raise RowError(show(value), "a list of messages {role, content}", field=field)
    if not value:
        raise RowError("an empty list", "at least one message", field=field)
    return tuple([_message(message, f"{field}[{i}]") for i, message in enumerate(value)])


def require_user_first(messages: Sequence[Message], *, field: str) -> None:
    """Raise RowError if the assistant speaks before any user."""
    roles = [message["role"] for message in messages]
    if "user" not in roles[: roles.index("assistant")]:
        raise RowError(
            "an assistant's message before any user's", "a user's message first", field=field
        )


def _message(value: Any, field: str) -> Message:
    if not isinstance(value, dict):
        raise RowError(show(value), "a message {role, content}", field=field)
    # Parquet fills absent keys with null
    message = {name: text for name, text in value.items() if text is not None}
    if "role" not in message and message.keys() >= {"from", "value"}:
        role, content = message.pop("from"), message.pop("value")
        message = {"role": _SHAREGPT_ROLES.get(role, role), "content": content, **message}
    if isinstance(message.get("content"), list):
        message["content"] = _text_of_parts(message["content"], f"{field}.content")
    for name in ("role", "content"):
        if name not in message:
            raise RowError(
                f"keys {', '.join(message) or 'none'}", f"a message with a {name!r}", field=field
            )
    for name, text in message.items():
        if not isinstance(text, str):
            raise RowError(show(text), "text", field=f"{field}.{name}")
    if message["role"] not in ROLES:
        raise RowError(show(message["role"]), f"one of {', '.join(ROLES)}", field=f"{field}.role")
    return message


def _text_of_parts(parts: list[Any], field: str) -> str:
    """Join the text of OpenAI's content in parts: [{"type": "text", "text": "..."}]."""
    texts = list[str]()
    for number, part in enumerate(parts):
        is_text = isinstance(part, dict) and part.get("type", "text") == "text"
        text = part.get("text") if is_text else None
        if not isinstance(text, str):
            expected = 'a part {"type": "text", "text": ...}'
            raise RowError(show(part), expected, field=f"{field}[{number}]")
        texts.append(text)
    return "".join(texts)
