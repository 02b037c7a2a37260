"""A tiny model that reads images: a random Qwen2.5-VL, beside the tokenizer of model/tiny.py.

    tandem tiny DIR --images

An image of 28 x 28 pixels, as `tandem generate squares` draws them, is 4 tokens. The directory
is an ordinary Hugging Face one, which `AutoModelForImageTextToText` loads. Knows no data sets.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tandem.model.tiny import CHARACTERS, TEMPLATE, check_shape, make_tokenizer, save_random

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


def make_tiny_images(
    folder: str | Path,
    *,
    characters: Sequence[str] = CHARACTERS,
    hidden: int = 128,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 640,
    max_tokens: int = 256,
    init_std: float = 0.06,
    seed: int = 0,
    pad_row: bool = False,
) -> int:
    """Write a random model of about 1.1M parameters, tokenizer and image processor. As make_tiny,
    with a vision tower of two layers of 64."""
    check_shape(hidden, heads, kv_heads)
    tokenizer = make_tokenizer(max_tokens, characters, VISION, IMAGE_TEMPLATE)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION))
    half = hidden // heads // 2
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_tokens,
        "initializer_range": init_std,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        },
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config={**TOWER, "out_hidden_size": hidden, "initializer_range": init_std},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        dtype="float32",
    )
    model_class = Qwen2_5_VLForConditionalGeneration
    count = save_random(model_class, config, tokenizer, folder, seed, pad_row)
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2))
    return count
