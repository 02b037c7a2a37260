"""A tiny model that reads images: a random Qwen2.5-VL, beside the tokenizer of model/tiny.py.

    tandem tiny DIR --images

An image of 28 x 28 pixels, as `tandem generate squares` draws them, is 4 tokens. The directory
is an ordinary Hugging Face one, which `AutoModelForImageTextToText` loads. Knows no data sets.
"""

import json
from pathlib import Path
from typing import Any

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tandem.model.tiny import TEMPLATE, make_tiny

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH, MERGE, LARGEST = 7, 2, 112  # pixels of a patch, patches on each side of a token, pixels
IMAGE_TEMPLATE = TEMPLATE.replace(
    "'|>' + message['content'] + '<|end|>' }}",
    "'|>' }}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|end|>' }}",
)
TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "window_size": 4 * PATCH,
    "fullatt_block_indexes": [1],
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": LARGEST**2},
}


def make_tiny_images(folder: str | Path, **shape: Any) -> int:
    """Write a random model of about 1.1M parameters, tokenizer and image processor. As make_tiny,
    with a vision tower of two layers of 64."""
    count = make_tiny(folder, **shape, others=VISION, template=IMAGE_TEMPLATE, build=_qwen_vl)
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2))
    return count


def _qwen_vl(tokenizer: Any, values: dict[str, Any]) -> Any:
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION))
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    half = hidden // heads // 2
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
    }
    tower = {"out_hidden_size": hidden, "initializer_range": values["initializer_range"]}
    config = Qwen2_5_VLConfig(
        text_config={**values, "rope_parameters": rope},
        vision_config={**TOWER, **tower},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        dtype="float32",
    )
    return Qwen2_5_VLForConditionalGeneration, config
