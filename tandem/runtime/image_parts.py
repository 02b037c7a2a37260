"""Images in the messages of chats, and in rows: content in parts, of which every room may ask."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.runtime.errors import UserError
from tandem.types import Message

VARIABLE = "TANDEM_IMAGES"  # in the environment: the folder of plugins/vision/store.py
COLUMNS = ("images", "image")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")


def keep_in(folder: Path) -> None:
    """Keep and look for images in a folder, in this process and those that it starts."""
    os.environ[VARIABLE] = str(folder.absolute())


def shows_images(message: Message) -> bool:
    """Tell whether a message has content in parts, some of them images:
    [{"type": "image", "image": "3fa9c1d20b7"}, {"type": "text", "text": "How many?"}]."""
    return isinstance(message.get("content"), list)


def message_text(message: Message) -> str:
    """Return the text of a message, with "[image]" for each image."""
    if not shows_images(message):
        return message["content"]  # type: ignore[no-any-return]
    return "".join(part.get("text", "[image]") for part in message["content"])


def images_of(messages: Iterable[Message]) -> list[str]:
    """List the names of the images in messages, in order."""
    parts = [part for m in messages if shows_images(m) for part in m["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


def require_no_images(chats: Iterable[Sequence[Message]], where: str) -> None:
    """Raise UserError for a chat with images: the model of `where` reads text."""
    for chat in chats:
        for message in chat:
            if isinstance(message.get("content"), list):  # as shows_images, for many messages
                raise UserError(
                    "a chat has images, and this model reads text alone",
                    where=where,
                    found=f"a message from {message['role']!r} with images",
                    expected="chats of text, or a model that reads images",
                    next="leave the images out, or set model.path to one that docs/guide/data.md "
                    "names under images",
                )


def image_column(values: Mapping[str, Any]) -> str:
    """Return the name of the column of images in a row's values; "" without one.

    `image` may be another column of a data set: it counts if it holds an image's file.
    """
    for name in COLUMNS:
        value = values.get(name)
        if value is None:  # of most data sets: a million rows come by here
            continue
        if isinstance(value, list) and value:
            return name
        is_file = isinstance(value, str) and value.lower().endswith(SUFFIXES)
        if is_file or is_data_uri(value) or (isinstance(value, dict) and "path" in value):
            return name
    return ""


def is_data_uri(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("data:")
