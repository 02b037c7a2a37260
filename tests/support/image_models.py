"""Tiny random models that read images, with tokenizer, chat template and image processor, and
pictures to read."""

import base64
import io
import json

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    Idefics3ForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    SmolVLMForConditionalGeneration,
)

from tandem.data.renderer import load_renderer
from tandem.model.tiny import CHARACTERS, TEMPLATE, make_tokenizer
from tandem.model.tokenizer import load_tokenizer
from tandem.plugins.vision.images import load_image_reader
from tandem.plugins.vision.tiny_images import IMAGE_TEMPLATE, PROCESSOR, VISION, make_tiny_images
from tandem.runtime.image_tokens import IMAGE
from tests.support.architectures import vocabulary_of
from tests.support.tiny import SHAPE

KINDS = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm", "idefics3")
TEXT = {name: value for name, value in SHAPE.items() if name != "tie_word_embeddings"}
TILES = ("<fake_token_around_image>", "<image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>")
TILE = 28  # pixels; of a wider image there are several
TILED_PROCESSOR = {
    "size": {"longest_edge": 2 * TILE},
    "max_image_size": {"longest_edge": TILE},
    "do_image_splitting": True,
}
# as SmolVLM's: content is always parts
TILED_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
assert "is string" in IMAGE_TEMPLATE != TEMPLATE


def save_image_model(kind, folder, seed=0):
    """Write a model directory; return it as text."""
    match kind:
        case "qwen2_5_vl":
            wide = {"hidden": 96, "layers": 2, "heads": 6, "kv_heads": 2, "intermediate": 172}
            make_tiny_images(folder, **wide, max_tokens=512, init_std=0.1, seed=seed)
        case "qwen3_vl":
            vision = {
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 96,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            }
            _save_qwen(Qwen3VLForConditionalGeneration, folder, seed, vision, head_dim=16)
        case "qwen2_vl":
            vision = {"embed_dim": 32, "hidden_size": 96, "mlp_ratio": 2}
            _save_qwen(Qwen2VLForConditionalGeneration, folder, seed, vision)
        case "smolvlm":
            _save_tiled(SmolVLMForConditionalGeneration, folder, seed, "SmolVLMImageProcessor")
        case "idefics3":
            _save_tiled(Idefics3ForConditionalGeneration, folder, seed, "Idefics3ImageProcessor")
    return str(folder)


def _save_qwen(make, folder, seed, vision, **text):
    tokenizer = make_tokenizer(512, CHARACTERS, VISION, IMAGE_TEMPLATE)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    patches = {"patch_size": PROCESSOR["patch_size"], "spatial_merge_size": PROCESSOR["merge_size"]}
    config = make.config_class(
        text_config={**TEXT, **vocabulary_of(tokenizer), "rope_parameters": rope, **text},
        vision_config={"depth": 2, "num_heads": 2, **patches, **vision},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings="head_dim" in text,
    )
    _save(make, config, tokenizer, PROCESSOR, folder, seed)


def _save_tiled(make, folder, seed, processor):
    tokenizer = make_tokenizer(512, CHARACTERS, TILES, TILED_TEMPLATE)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": TILE,
        "patch_size": 7,
    }
    config = make.config_class(
        text_config={**TEXT, **vocabulary_of(tokenizer), "model_type": "llama"},
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    processor = {**TILED_PROCESSOR, "image_processor_type": processor}
    _save(make, config, tokenizer, processor, folder, seed)


def _save(make, config, tokenizer, processor, folder, seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(config).float()
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data = torch.randn(weight.shape) * 0.1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def stock_image_model(folder):
    """Plain transformers, eager attention."""
    return AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


def picture(seed, width=28, height=28):
    """The bytes of a random PNG file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data_uri(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def prompts_of(folder, *chats):
    return load_renderer(folder).prompts(chats)


def stock_logits(folder, names, tokens, model=None):
    """Logits of stock transformers, or of model, for a sequence: it gets its processor's arrays of
    all images, and their placeholder in the tokens."""
    reader = load_image_reader(folder, load_tokenizer(folder))
    of_images = torch.from_numpy(tokens >= IMAGE)[None]
    ids = torch.from_numpy(np.where(tokens >= IMAGE, reader.token_id, tokens))[None]
    arrays = [reader.arrays(name) for name in names]
    joined = {  # tiles are beside each other, patches below
        key: torch.from_numpy(np.concatenate([own[key] for own in arrays], int(first.ndim > 2)))
        for key, first in arrays[0].items()
    }
    types = {"mm_token_type_ids": of_images.int()} if "image_grid_thw" in joined else {}
    with torch.no_grad():
        model = model or stock_image_model(folder)
        return model(input_ids=ids, **joined, **types).logits[0]
