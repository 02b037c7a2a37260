"""Images in the messages of chats: content in parts, of which every room may ask."""

from collections.abc import Iterable

from tandem.types import Message


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
