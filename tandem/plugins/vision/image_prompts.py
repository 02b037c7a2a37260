"""Images in the texts that a chat template writes, and in their tokens.

    template    <|vision_start|><|image_pad|><|vision_end|>How many?      one place an image
    text        ... as many <|image_pad|> as the image has tokens ...     as transformers' processor
    tokens      the ids of these places become the image's (runtime/image_tokens.py)

Knows no pixels: those are plugins/vision/images.py.
"""

from collections.abc import Callable, Sequence

import numpy as np

from tandem.plugins.vision.images import ImageReader
from tandem.runtime.errors import UserError
from tandem.runtime.image_parts import images_of
from tandem.runtime.image_tokens import image_run
from tandem.types import Array, Message

Chats = Sequence[Sequence[Message]]


class ImagePrompts:
    """Chats with images for one model's template. where: of the template, for errors."""

    def __init__(self, reader: ImageReader, template: str, where: str):
        self._reader, self._where = reader, where
        self._wants_parts = "is string" not in template  # else it writes content that is text

    def prepare(self, chats: Chats) -> Chats:
        """Return the chats with content as the template reads it."""
        return [[_in_parts(m) for m in chat] for chat in chats] if self._wants_parts else chats

    def encode(
        self, texts: list[str], chats: Chats, encode: Callable[[list[str]], list[Array]]
    ) -> list[Array]:
        """Return int64 [T] of texts, with the tokens of the images in their chats. encode: of texts
        without images."""
        names = [images_of(chat) for chat in chats]
        rows = encode([self._expand(*pair) for pair in zip(texts, names, strict=True)])
        return [self._with_tokens(*pair) for pair in zip(rows, names, strict=True)]

    def _expand(self, text: str, names: list[str]) -> str:
        """Write as many places for each image as it has tokens."""
        first, *rest = text.split(self._reader.token)
        if len(rest) != len(names):
            raise UserError(
                "the chat template does not write one place for each image",
                where=self._where,
                found=f"{len(rest)} times {self._reader.token} for {len(names)} images",
                expected="as many places as images",
                next=f"leave {self._reader.token} out of the texts, or correct the template",
            )
        texts = [self._reader.text(name) + after for name, after in zip(names, rest, strict=True)]
        return "".join([first, *texts])

    def _with_tokens(self, row: Array, names: list[str]) -> Array:
        runs = [image_run(name, self._reader.count(name)) for name in names]
        if runs:
            row[row == self._reader.token_id] = np.concatenate(runs)
        return row


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}
