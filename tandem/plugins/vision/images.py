"""Images as a model reads them: transformers' image processor of a model directory, in its PIL
variant, which needs no torchvision.

Gives the text that stands for an image in a prompt, as transformers' processing_*.py writes it, and
the arrays that the model computes its features from; ImagePrompts puts both into chats. Knows no
weights.
"""

import io
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandem.model.config_file import check_model, find_file, first_line
from tandem.plugins.vision import store
from tandem.runtime.errors import UserError
from tandem.runtime.image_parts import images_of
from tandem.runtime.image_tokens import MOST_PLACES, image_run
from tandem.types import Array, Message

FILES = (  # of a model directory, that say how it reads images
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
TILED = ("smolvlm", "idefics3")  # whose images are tiles, with text between them
EDGE = "<fake_token_around_image>"
KEPT_BYTES = 256 << 20  # of processed images
# of an image: rows and columns of tiles beside the one of the whole, and tokens of each
Layout = tuple[int, int, int]


class ImageReader:
    """Images as one model reads them.

    token: the text of one token of an image, whose id is token_id.
    """

    def __init__(self, processor: Any, config: Any, tokenizer: Any):
        self._processor, self._config = processor, config
        self._tiled = config.model_type in TILED
        self.token_id: int = config.image_token_id
        self.token: str = tokenizer.convert_ids_to_tokens(self.token_id)
        self._layouts: dict[str, Layout] = {}
        self._kept: OrderedDict[str, dict[str, Array]] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()  # prompts are rendered in threads

    def text(self, name: str) -> str:
        """Return what stands for the image in a prompt, where its template writes `token`."""
        rows, columns, each = self._layout(name)
        run = self.token * each
        if not self._tiled:
            return run
        lines = [
            "".join(f"{EDGE}<row_{row}_col_{column}>{run}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        tiles = "".join(f"{line}\n" for line in lines) + "\n" * bool(lines)
        return f"{tiles}{EDGE}<global-img>{run}{EDGE}"

    def count(self, name: str) -> int:
        """Return how many tokens the image has."""
        rows, columns, each = self._layout(name)
        return (rows * columns + 1) * each

    def arrays(self, name: str) -> dict[str, Array]:
        """Return the arrays of the image by the names that the model's get_image_features has."""
        with self._lock:
            found = self._kept.pop(name, None)
            self._kept_bytes -= _bytes(found)
        if found is None:
            from PIL import Image, ImageOps

            options = {"return_row_col_info": True} if self._tiled else {}
            try:
                file = Image.open(io.BytesIO(store.get(name)), formats=store.FORMATS)
                image = ImageOps.exif_transpose(file).convert("RGB")  # as transformers loads one
                made = dict(self._processor(images=[image], return_tensors="np", **options))
            except (OSError, ValueError) as error:
                raise UserError(
                    "an image cannot be read",
                    where=str(store.image_folder() / name),
                    found=first_line(error),
                    next="leave its row out",
                ) from None
            self._layouts[name] = self._layout_of(made)
            if self.count(name) > MOST_PLACES:
                raise UserError(
                    "an image has too many tokens",
                    where=str(store.image_folder() / name),
                    found=f"{self.count(name):,}",
                    expected=f"at most {MOST_PLACES:,}",
                    next="lower the size in the model's preprocessor_config.json",
                )
            names = self._processor.model_input_names
            found = {key: np.asarray(made[key]) for key in names if key in made}
        with self._lock:
            self._kept_bytes += _bytes(found) - _bytes(self._kept.get(name))  # another thread's
            self._kept[name] = found
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= _bytes(self._kept.popitem(last=False)[1])
        return found

    def _layout(self, name: str) -> Layout:
        if name not in self._layouts:
            self.arrays(name)
        return self._layouts[name]

    def _layout_of(self, found: dict[str, Any]) -> Layout:
        if not self._tiled:
            patches = int(found["image_grid_thw"][0].prod())
            return 0, 0, patches // self._processor.merge_size**2
        [[rows]], [[columns]] = found["rows"], found["cols"]
        vision, factor = self._config.vision_config, self._config.scale_factor
        return rows, columns, (vision.image_size // vision.patch_size) ** 2 // factor**2


def _bytes(arrays: dict[str, Array] | None) -> int:
    return sum(array.nbytes for array in (arrays or {}).values())


def load_image_reader(path: str, tokenizer: Any) -> ImageReader:
    """Load what reads images for a model directory or hub name. Raises UserError."""
    config = check_model(path)
    try:
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(path, backend="pil")
    except Exception as error:  # a damaged file may raise anything
        raise UserError(
            "the model's image processor cannot be loaded",
            where=f"{path}, preprocessor_config.json",
            found=first_line(error),
            expected="the file as transformers writes it, and the package pillow",
            next="copy preprocessor_config.json of the base model; pip install 'tandem-rl[images]'",
        ) from None
    return ImageReader(processor, config, tokenizer)


def copy_processor(source: str, folder: Path) -> None:
    """Copy the files that say how the model at `source` reads images into a directory."""
    for name in FILES:
        if (file := find_file(source, name)) is not None:
            shutil.copyfile(file, folder / name)


Chats = Sequence[Sequence[Message]]


class ImagePrompts:
    """Chats with images for one model's template. where: of the template, for errors.

    template    <|vision_start|><|image_pad|><|vision_end|>How many?      one place an image
    text        ... as many <|image_pad|> as the image has tokens ...     as transformers' processor
    tokens      the ids of these places become the image's (runtime/image_tokens.py)
    """

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
