"""Chat messages as rows of a file hold them.

Knows roles, text and tool calls. Does not know files, nor which roles a model's chat template can
write.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tandem.data.readers import Row, RowError, show
from tandem.registry import find
from tandem.runtime.image_parts import image_column, shows_images
from tandem.types import Message

Part = dict[str, Any]  # of content: text, or an image

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
}
_IMAGE_KEYS = ("image", "url", "path")  # of a part, as processors and data sets name it


def prompt_messages(
    value: Any, *, field: str, images: bool = True, tools: bool = False
) -> tuple[Message, ...]:
    """Read a prompt: the user's text, or messages that end with the user's. images: it may have
    some; tools: it may end with a message that is not the assistant's. Raises RowError."""
    if isinstance(value, str):
        messages: tuple[Message, ...] = ({"role": "user", "content": value},)
    elif isinstance(value, list):
        messages = chat_messages(value, field=field, images=images)
    else:
        raise RowError(
            show(value),
            "text, or a list of messages {role, content}",
            field=field,
            next='write the prompt as text: "..."',
        )
    last = messages[-1]
    if last["role"] == "assistant" or not (tools or last["role"] == "user"):
        found = f"a last message from {last['role']!r}"
        raise RowError(found, "a prompt that ends with the user's message", field=field)
    if not (shows_images(last) or last["role"] == "tool" or last["content"].strip()):
        raise RowError("an empty message", "a message with text", field=field)
    return messages


def chat_messages(value: Any, *, field: str, images: bool = False) -> tuple[Message, ...]:
    """Read messages with a known role and text; keep other keys with text for the chat template.

    ShareGPT's {from, value}, OpenAI's content in parts and `tool_calls` are read, too. images:
    content with images, which stays a list of parts (images.py), is too. Raises RowError.
    """
    if not isinstance(value, list):
        raise RowError(show(value), "a list of messages {role, content}", field=field)
    if not value:
        raise RowError("an empty list", "at least one message", field=field)
    return tuple([_message(message, f"{field}[{i}]", images) for i, message in enumerate(value)])


def require_user_first(messages: Sequence[Message], *, field: str) -> None:
    """Raise RowError if the assistant speaks before any user."""
    roles = [message["role"] for message in messages]
    if "user" not in roles[: roles.index("assistant")]:
        raise RowError(
            "an assistant's message before any user's", "a user's message first", field=field
        )


def _message(value: Any, field: str, images: bool) -> Message:
    if not isinstance(value, dict):
        raise RowError(show(value), "a message {role, content}", field=field)
    # a key without a value says nothing: null, or a list of no calls
    message = {name: text for name, text in value.items() if text is not None and text != []}
    if "role" not in message and message.keys() >= {"from", "value"}:
        role, content = message.pop("from"), message.pop("value")
        kind = "function_call" if role == "function_call" else "content"
        message = {"role": _SHAREGPT_ROLES.get(role, role), kind: content, **message}
    if message.get("role") == "function":  # OpenAI's answer to a `function_call`
        message["role"] = "tool"
    calls = message.pop("function_call", None) or message.get("tool_calls")
    if calls is not None:
        message["tool_calls"] = tool_calls(calls, field=f"{field}.tool_calls")
        message.setdefault("content", "")
    if isinstance(message.get("content"), list):
        parts = [
            _part(part, f"{field}.content[{number}]", images)
            for number, part in enumerate(message["content"])
        ]
        # with images they stay parts
        has_images = any(part["type"] == "image" for part in parts)
        message["content"] = parts if has_images else "".join(part["text"] for part in parts)
    for name in ("role", "content"):
        if name not in message:
            raise RowError(
                f"keys {', '.join(message) or 'none'}", f"a message with a {name!r}", field=field
            )
    for name, text in message.items():
        known = name == "tool_calls" or (name == "content" and shows_images(message))
        known |= name == "weight" and text in (0, 1)
        if not (known or isinstance(text, str)):
            raise RowError(show(text), "text", field=f"{field}.{name}")
    if message["role"] not in ROLES:
        raise RowError(show(message["role"]), f"one of {', '.join(ROLES)}", field=f"{field}.role")
    return message


def tool_calls(value: Any, *, field: str) -> list[dict[str, Any]]:
    """Read calls in OpenAI's form, whose arguments are an object or its JSON, or as {name,
    arguments}; they may be JSON as a whole. An argument that is null is left out, unless its object
    was JSON: tables write one into every row. Raises RowError."""
    value = parsed(value)
    calls = value if isinstance(value, list) else [value]
    return [_tool_call(call, f"{field}[{number}]") for number, call in enumerate(calls)]


def _tool_call(call: Any, field: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name)} as function} if name:
            pass
        case {"name": str(name)} as function if name:
            pass
        case _:
            expected = 'a call {"function": {"name": ..., "arguments": ...}}'
            raise RowError(show(call), expected, field=field)
    given = function.get("arguments") or {}
    arguments = parsed(given) if isinstance(given, str) else without_nulls(given)
    if not isinstance(arguments, dict):
        raise RowError(show(given), "an object, or its JSON", field=f"{field}.function.arguments")
    called = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return called | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def parsed(value: Any) -> Any:
    """Return what a JSON text says; any other value as it is."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def without_nulls(value: Any) -> Any:
    """Leave out keys whose value is null, at every depth: a column of a table has all keys in all
    rows."""
    match value:
        case dict():
            return {key: without_nulls(own) for key, own in value.items() if own is not None}
        case list():
            return [without_nulls(item) for item in value]
    return value


def _part(part: Any, field: str, images: bool) -> Part:
    """Read {"type": "text", "text": ...}, {"type": "image", "image": FILE} or OpenAI's
    {"type": "image_url", "image_url": {"url": ...}}; an image may be in a column instead."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(found)} | str(found)} if images:
            return {"type": "image", "image": found}
        case {"type": "image"} if images:
            files = [part[name] for name in _IMAGE_KEYS if part.get(name) is not None]
            return {"type": "image", "image": files[0]} if files else {"type": "image"}
        case {"text": str(text)} if part.get("type", "text") == "text":
            return {"type": "text", "text": text}
    expected = 'a part {"type": "text", "text": ...}'
    raise RowError(show(part), expected + ", or of an image" * images, field=field)


def with_images(messages: tuple[Message, ...], row: Row) -> tuple[Message, ...]:
    """Return the chat with its images, and those of the row's column, as parts that name them."""
    if not (image_column(row.values) or any(map(shows_images, messages))):
        return messages
    found: tuple[Message, ...] = find("row_parts", "images", key="data")(messages, row)
    return found
