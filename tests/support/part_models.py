"""Tiny random models that read images or sound too, of kinds whose language model runs alone."""

import torch
from transformers import (
    AutoConfig,
    AutoModelForMultimodalLM,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma4Config,
    Gemma4VisionConfig,
    Idefics2Config,
    Llama4Config,
    Llama4TextConfig,
    LlavaConfig,
    Mistral3Config,
    PixtralVisionConfig,
    Qwen3_5Config,
    VoxtralConfig,
)

from tandem.model.tiny import make_tokenizer
from tests.support.architectures import SHAPE, VOCAB, architecture, randomize, vocabulary_of

VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 2}
LLAMA_VISION = {
    **VISION,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
LLAMA4 = {
    "intermediate_size_mlp": 172,
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "attention_chunk_size": 64,
}
PERCEIVER = {
    "hidden_size": 96,
    "resampler_depth": 1,
    "resampler_n_heads": 2,
    "resampler_head_dim": 16,
    "num_key_value_heads": 2,
    "resampler_n_latents": 4,
}
AUDIO = {
    "hidden_size": 32,
    "intermediate_size": 128,  # four frames
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_mel_bins": 8,
    "max_source_positions": 8,
}
PARTS = {  # model type of the whole: that of its language model
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "llava": "llama",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "idefics2": "mistral",
    "voxtral": "llama",
}


def stock_whole(kind, seed=0, **changes):
    """transformers' model of both parts, with random weights; changes: of the text's config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForMultimodalLM.from_config(
            whole_config(kind, changes), attn_implementation="eager"
        ).eval()
        randomize(model)
    return model


def whole_config(kind, changes):
    size, separate = architecture("llama").hidden_size, {"tie_word_embeddings": False}
    match kind:
        case "gemma3":
            text = architecture("gemma3_text", **changes)
            vision = AutoConfig.for_model("siglip_vision_model", **VISION)
            return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
        case "gemma4":
            rows = changes.get("vocab_size", VOCAB)
            text = architecture("gemma4_text", **changes, vocab_size_per_layer_input=rows)
            vision = Gemma4VisionConfig(
                **{**VISION, "patch_size": 4}, num_key_value_heads=2, head_dim=16
            )
            return Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
        case "mistral3":
            text = architecture("mistral", **separate, **changes)
            vision = PixtralVisionConfig(**VISION, head_dim=16)
            return Mistral3Config(text_config=text, vision_config=vision, **separate)
        case "llava":
            text = architecture("llama", **separate, **changes)
            vision = CLIPVisionConfig(**VISION)
            return LlavaConfig(text_config=text, vision_config=vision, **separate)
        case "llama4":
            text = Llama4TextConfig(**{**SHAPE, **LLAMA4, **changes})
            return Llama4Config(text_config=text, vision_config=LLAMA_VISION)
        case "qwen3_5":
            text = architecture("qwen3_5_text", **changes).to_dict()
            vision = {**QWEN_VISION, "out_hidden_size": size}
            return Qwen3_5Config(text_config=text, vision_config=vision)
        case "idefics2":
            text = architecture("mistral", **separate, **changes)
            return Idefics2Config(
                text_config=text, vision_config=VISION, perceiver_config=PERCEIVER, **separate
            )
        case "voxtral":  # its own config says nothing of tied weights
            text = architecture("llama", **separate, **changes)
            return VoxtralConfig(text_config=text, audio_config=AUDIO, audio_token_id=7)


def save_whole(kind, folder, **changes):
    """Write a model directory with a tokenizer of characters; return it as text."""
    tokenizer = make_tokenizer()
    stock_whole(kind, **vocabulary_of(tokenizer), **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
