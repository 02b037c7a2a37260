"""Chat templates that installed packages ship, each with a byte-level tokenizer of its marks."""

import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.data.renderer import ChatRenderer
from tandem.model.call_forms import spoken

# what ends a turn, by the generation configs of the families
ENDS = (
    *("<|im_end|>", "</s>", "<|eot_id|>", "<|eot|>", "<|eom_id|>", "<|eom|>", "<turn|>", "<|end|>"),
    *("<|tool_response>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "[e~[", "<|calls|>"),
    *("<|message_sep|>", "[|endofturn|]", "<|role_end|>", "<|call|>", "<|end_of_text|>", "<sep>"),
    *("<SPECIAL_12>", "<seed:eos>", "<end_of_sentence>", "</assistant>", "<|assistant_end|>"),
    *("<｜hy_eos:opensource｜>", "<|end_of_msg|>", "<|observation|>", "<|user|>", "<|return|>"),
)


def call_templates(folder=None):
    """The chat templates in a folder, by default trl's, that write calls: name -> text."""
    if folder is None:
        import trl

        folder = Path(trl.__file__).parent / "chat_templates"
    texts = {file.stem: file.read_text() for file in sorted(Path(folder).glob("*.jinja"))}
    return {
        name: text
        for name, text in texts.items()
        if "tool_calls" in text and not name.endswith("_training")
    }


def call_marks(template):
    """The special tokens of a template that are part of what a model says."""
    tokens = re.findall(r"<[^<>\s]+>|\[/?[A-Z_]+\]|｜DSML｜", template)
    return {token for token in tokens if spoken(token)}


def template_renderer(name, template):
    """The renderer of a template, in whose tokenizer every byte is a token, and every mark one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    marks = sorted({m for m in ENDS if m in template + "</s>"} | call_marks(template))
    core.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in marks])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", bos_token="<s>")
    ends = {tokenizer.convert_tokens_to_ids(mark) for mark in marks if mark in ENDS}
    return ChatRenderer(tokenizer, template, ends, name)
