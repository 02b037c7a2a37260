"""Model directories with a byte-level tokenizer: 256 bytes, one merge, four special tokens, no
network."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder, template=CHATML, eos="<|im_end|>", generation=None):
    """A directory with a tokenizer in which every byte is a token, and two line ends in a row are
    one.

    It puts <|bos|> before a text unless told not to, as Llama's does.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "ĊĊ"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|bos|>"])
    bos = ("<|bos|>", core.token_to_id("<|bos|>"))
    core.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[bos])
    special = {"extra_special_tokens": ["<|im_start|>", "<|im_end|>", "<|bos|>"], "eos_token": eos}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, **{k: v for k, v in special.items() if v}
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)
