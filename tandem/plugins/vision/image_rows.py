"""Images of rows: put into the chat as parts that name a file of the image store.

    {"prompt": "How many?", "images": ["squares/7.png"]}
    {"prompt": [{"role": "user", "content": [{"type": "image", "image": "squares/7.png"},
                                             {"type": "text", "text": "How many?"}]}]}

Images of a column go where the chat has a place for one: a part without a file (TRL), or `<image>`
in a user's text (verl); without places they stand before the first user's text. Knows no tokens.
"""

import base64
import io
from pathlib import Path
from typing import Any

from tandem.data.readers import Row, RowError, show
from tandem.plugins.vision.store import FORMATS, put
from tandem.runtime.image_parts import image_column, is_data_uri, shows_images
from tandem.types import Message

MARK = "<image>"  # verl's place of an image in a text
EXPECTED = "a path, a data: URI, or an object {bytes, path}, of a PNG, JPEG, GIF, BMP or WebP file"

Messages = tuple[Message, ...]


def with_images(messages: Messages, row: Row) -> Messages:
    """Return the chat with all its images, and those of the row's column, as parts that name them.
    Raises RowError for one that cannot be read, or has no place."""
    name = image_column(row.values)
    value = row.values[name] if name else []
    given = value if isinstance(value, list) else [value]
    messages = tuple([{**message} for message in messages])
    if given and not _places(messages):
        if any(map(shows_images, messages)):
            raise RowError("images in the chat, and others beside it", "one of both", field=name)
        messages = _at_marks(messages) or _in_front(messages, len(given))
    places = _places(messages)
    if len(places) != len(given):
        raise RowError(
            f"{len(given)} images for {len(places)} places in the chat",
            "as many images as parts without a file, or <image> in the text",
            field=name or "images",
        )
    for number, (place, own) in enumerate(zip(places, given, strict=True)):
        place["image"] = _kept(own, row, f"{name}[{number}]")
    named = [id(place) for place in places]
    for message in filter(shows_images, messages):
        for part in message["content"]:
            if part["type"] == "image" and id(part) not in named:
                part["image"] = _kept(part["image"], row, "content")
    return messages


def _places(messages: Messages) -> list[dict[str, Any]]:
    """List the parts for an image that name none."""
    parts = [part for m in messages if shows_images(m) for part in m["content"]]
    return [part for part in parts if part["type"] == "image" and "image" not in part]


def _at_marks(messages: Messages) -> Messages:
    """Return the chat with a place for each mark in a user's text; () without marks."""
    found = [message for message in messages if MARK in _user_text(message)]
    for message in found:
        first, *rest = message["content"].split(MARK)
        parts = [{"type": "text", "text": first}]
        for text in rest:
            parts += [{"type": "image"}, {"type": "text", "text": text}]
        message["content"] = [part for part in parts if part.get("text", MARK)]
    return messages if found else ()


def _in_front(messages: Messages, count: int) -> Messages:
    """Return the chat with so many places before the first user's text."""
    first = next((message for message in messages if _user_text(message)), None)
    if first is not None:
        text = {"type": "text", "text": first["content"]}
        first["content"] = [*({"type": "image"} for _ in range(count)), text]
    return messages


def _user_text(message: Message) -> str:
    is_text = message["role"] == "user" and not shows_images(message)
    return str(message["content"]) if is_text else ""


def _kept(value: Any, row: Row, field: str) -> str:
    """Put an image's file into the store; return its name."""
    data = _bytes(value, row, field)
    try:
        from PIL import Image
    except ImportError:
        raise RowError(
            "an image, and no package to read it",
            "the package pillow",
            field=field,
            next="pip install 'tandem-rl[images]'",
        ) from None
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            image.load()  # all of it: the beginning of a JPEG tells nothing of its end
    except Exception as error:  # a damaged file may raise anything
        what = f"{len(data):,} bytes that are no image ({type(error).__name__})"
        raise RowError(what, EXPECTED, field=field) from None
    return put(data)


def _bytes(value: Any, row: Row, field: str) -> bytes:
    match value:
        case {"bytes": str() as found} | {"path": str() as found}:
            return _bytes(found, row, field)
        case str() if is_data_uri(value):
            try:
                return base64.b64decode(value.partition(",")[2], validate=True)
            except ValueError as error:
                raise RowError(f"a data: URI, {error}", "one in base64", field=field) from None
        case str() if value.startswith(("http://", "https://")):
            raise RowError(
                show(value),
                EXPECTED,
                field=field,
                next="fetch the image, as a run reads files only, or rename the column",
            )
        case str():
            file = row.folder / Path(value.removeprefix("file://"))
            try:
                return file.read_bytes()
            except (OSError, ValueError) as error:  # a name with a zero byte is the second
                reason = error.strerror if isinstance(error, OSError) else error
                found = f"{show(value)}: {reason}"
                raise RowError(
                    found, f"a file beside the data, in {row.folder}", field=field
                ) from None
    raise RowError(show(value), EXPECTED, field=field)
