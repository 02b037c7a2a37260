"""Models that read images, on the inexact path: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, SmolVLM, Idefics3.

The vision tower turns each image of a pass into features, once and by itself, so that they depend
on nothing else; they go into the embeddings at the image's tokens (image_tokens.py), and
transformers' language model runs over these. The rotary positions of Qwen's, which count an image's
rows and columns, are computed from the sequence itself, never from what the module remembers.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.model.general import put_exact_parts
from tandem.model.inexact import NO_PASS, InexactModel
from tandem.model.lora import Lora, add_adapter
from tandem.model.paths import ModelPath
from tandem.model.tokenizer import load_tokenizer
from tandem.plugins.vision.images import (
    ImagePrompts,
    ImageReader,
    copy_processor,
    load_image_reader,
)
from tandem.runtime.errors import UserError
from tandem.runtime.image_tokens import IMAGE, MOST_PLACES, PLACE_BITS, name_from


class ImageModel(InexactModel):
    """transformers' model of images and text."""

    def __init__(self, module: Any, lora: Lora | None, gap: str, reader: ImageReader):
        super().__init__(module, lora, put_exact_parts(module, lora), gap, caches=True)
        self._reader = reader
        self._counts_rows = hasattr(module.base_model, "get_rope_index")

    def run(self, tokens: Tensor, cache: Any = None, shift: int = 0) -> Tensor:
        tokens, known = tokens.to(self.device), {} if cache is None else {self.cache_name: cache}
        past = 0 if cache is None else cache.get_seq_length()
        with self._repeating(NO_PASS, self._base_only):
            embeddings, others = self._embed(tokens)
            if self._counts_rows:
                others["position_ids"] = self._positions(tokens, past, shift)
            decoder, others["use_cache"] = self.module.get_decoder(), cache is not None
            out = decoder(inputs_embeds=embeddings, **known, **others)
        states: Tensor = out.last_hidden_state
        return states

    def shift(self, tokens: Tensor) -> int:
        if not self._counts_rows:
            return 0
        return int(self._rotary_positions(tokens).max()) + 1 - tokens.shape[1]

    def save_reader(self, source: str, folder: Path) -> None:
        copy_processor(source, folder)

    def _positions(self, tokens: Tensor, past: int, shift: int) -> Tensor:
        """Compute rotary positions, int64 [3, B, L]. past, shift: of tokens in the cache."""
        if not past:
            return self._rotary_positions(tokens)
        count, rows = tokens.shape[1], len(tokens)
        return torch.arange(past, past + count, device=self.device).add(shift).expand(3, rows, -1)

    def _rotary_positions(self, tokens: Tensor) -> Tensor:
        of_images = (tokens >= IMAGE).to(self.device)
        first = tokens[(tokens >= IMAGE) & (tokens % MOST_PLACES == 0)]
        names = [name_from(number) for number in ((first - IMAGE) >> PLACE_BITS).tolist()]
        grids = [self._reader.arrays(name)["image_grid_thw"][0] for name in names]
        positions, _ = self.module.base_model.get_rope_index(
            tokens.to(self.device),
            mm_token_type_ids=of_images.int(),
            image_grid_thw=torch.from_numpy(np.array(grids, np.int64).reshape(-1, 3)),
        )
        return positions  # type: ignore[no-any-return]

    def _embed(self, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Compute the embeddings [B, L, D] of tokens, and what else the language model gets."""
        of_images = tokens >= IMAGE
        ids = tokens.masked_fill(of_images, self._reader.token_id)
        embeddings: Tensor = self.module.get_input_embeddings()(ids)
        if not of_images.any():
            return embeddings, {}
        numbers = (tokens[of_images] - IMAGE) >> PLACE_BITS
        distinct, which = numbers.unique(return_inverse=True)
        levels = [self._features(name_from(number)) for number in distinct.tolist()]
        sizes = torch.tensor([0, *(len(own[0]) for own in levels)], device=self.device)
        places = tokens[of_images] % MOST_PLACES
        if (places >= sizes[which + 1]).any():
            raise UserError(
                "an image has fewer tokens than the sequence has of it",
                where="preprocessor_config.json",
                found=f"{int(places.max()) + 1:,} tokens of an image in the sequence",
                expected=f"at most {int(sizes.max()):,}",
                next="restore the image processor that the sequence was made with",
            )
        at = sizes.cumsum(0)[which] + places
        first, *deeper = (torch.cat(level)[at] for level in zip(*levels, strict=True))
        embeddings = embeddings.masked_scatter(of_images[..., None], first.to(embeddings.dtype))
        others = {"visual_pos_masks": of_images, "deepstack_visual_embeds": deeper}
        return embeddings, others if deeper else {}

    def _features(self, name: str) -> list[Tensor]:
        """Compute the features [N, D] of an image, and those that deeper layers add (Qwen3-VL)."""
        arrays = self._reader.arrays(name).items()
        out = self.module.base_model.get_image_features(
            **{key: torch.from_numpy(array).to(self.device) for key, array in arrays},
            return_dict=True,
        )
        deeper = getattr(out, "deepstack_features", None) or []  # transformers' own
        features = [torch.cat(tuple(level)) for level in (out.pooler_output, *deeper)]
        if len(features[0]) != self._reader.count(name):
            raise UserError(
                "the image processor is not this model's",
                where="preprocessor_config.json",
                found=f"{self._reader.count(name)} tokens for an image",
                expected=f"{len(features[0])}, as the vision tower has features",
                next="copy preprocessor_config.json of the base model",
            )
        return features


class Vision(ModelPath):
    name = "vision"

    def why_not(self, config: Any, place: Any) -> str:
        return ""  # registry.py has the types of models

    def gap(self, config: Any, place: Any) -> str:
        return f"architecture {config.model_type}: it reads images"

    def maker(self, folder: str, config: Any, place: Any) -> Callable[..., ImageModel]:
        reader = load_image_reader(folder, load_tokenizer(folder))
        return partial(make_image_model, reader=reader, gap=self.gap(config, place))

    def prompts(self, folder: str, tokenizer: Any) -> Callable[[str, str], ImagePrompts]:
        return partial(ImagePrompts, load_image_reader(folder, tokenizer))


VISION = Vision()


def make_image_model(
    module: Any, lora: Lora | None = None, *, reader: ImageReader, gap: str
) -> ImageModel:
    """Put exact parts into a transformers module in place, and with lora a new adapter in its
    language model."""
    if lora is not None:
        add_adapter(module, lora)
    return ImageModel(module.eval(), lora, gap, reader)
