"""Images as a model reads them: transformers' image processor of a model directory, in its PIL
variant, which needs no torchvision.

Gives the text that stands for an image in a prompt, as transformers' processing_*.py writes it, and
the arrays that the model computes its features from. Knows no chats and no weights.
"""

import io
import shutil
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from tandem.model.config_file import check_model, find_file, first_line
from tandem.plugins.vision import store
from tandem.runtime.errors import UserError
from tandem.runtime.image_tokens import MOST_PLACES
from tandem.types import Array

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
                    expected="an image that the model's image processor takes",
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
