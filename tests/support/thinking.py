"""A tiny random model whose chat template, Qwen3's own, drops the thoughts of earlier turns."""

from pathlib import Path

from transformers import Qwen3Config, Qwen3ForCausalLM

from tandem.model.tiny import make_tokenizer, save_random
from tests.support.architectures import vocabulary_of
from tests.support.tiny import SHAPE

MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


def template():
    import trl

    return (Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text()


def save_thinking(folder):
    tokenizer = make_tokenizer(SHAPE["max_position_embeddings"], others=MARKS, template=template())
    tokenizer.eos_token = "<|im_end|>"
    size = {**vocabulary_of(tokenizer), "hidden_size": 48, "head_dim": 16}
    config = Qwen3Config(**{**SHAPE, **size}, dtype="float32")
    save_random(Qwen3ForCausalLM, config, tokenizer, folder, seed=0)
