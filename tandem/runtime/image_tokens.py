"""Tokens of an image: ids beyond every vocabulary, which name the image by its content.

    bit 62   an image's
    16-59    name of the image: the first 44 bits of the SHA-256 of its file, 11 hex digits
    0-15     place in the image's run of tokens

So prompts with other images are other prompts wherever tokens are compared, hashed, packed or
written, and no type has a field for images. Only the model (image_model.py) turns ids into pixels.
Knows no files and no tensors.
"""

import hashlib

import numpy as np

from tandem.types import Array

IMAGE = 1 << 62
PLACE_BITS, NAME_DIGITS = 16, 11
MOST_PLACES = 1 << PLACE_BITS  # tokens of one image


def name_of(data: bytes) -> str:
    """Return the name of the image in a file's bytes."""
    return hashlib.sha256(data).hexdigest()[:NAME_DIGITS]


def image_run(name: str, count: int) -> Array:
    """Return the tokens of an image, int64 [count]."""
    return (IMAGE | int(name, 16) << PLACE_BITS) + np.arange(count, dtype=np.int64)


def name_from(number: int) -> str:
    """Return the name of an image by its number."""
    return f"{number:0{NAME_DIGITS}x}"


def text_tokens(tokens: Array) -> Array:
    """Return the tokens that are no image's."""
    return tokens[tokens < IMAGE]
