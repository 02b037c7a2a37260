"""A model small enough to train on a laptop in a minute: a random Qwen3 and a tokenizer.

    tandem tiny DIR

The tokenizer is of characters, or of pieces learned from texts. The folder is an ordinary Hugging
Face one, which `AutoModelForCausalLM` and `AutoTokenizer` load. Knows no data sets, no training.
"""

import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, logging

from tandem.runtime.errors import UserError

PAD, END, UNKNOWN = "<pad>", "<|end|>", "<unk>"
ROLES = ("user", "assistant", "system", "tool")
# One token: it is in every response, and eight characters would be a third of a short one.
ANSWER = "Answer: "
LEARNED = 512  # tokens that BPE adds to the characters, at most
SMALLEST_HEAD = 8  # a smaller one is not exact, see config_file.why_not_exact
CHARACTERS = sorted(set(string.printable) - set("\t\r\x0b\x0c"))  # printable ASCII and the newline

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant', 'system', 'tool'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tiny(
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
    others: Sequence[str] = (),
    texts: Sequence[str] = (),
    template: str = TEMPLATE,
    build: Callable[[Any, dict[str, Any]], Any] | None = None,
) -> int:
    """Write a random model of about 0.9M parameters and its tokenizer. others, texts, template: of
    make_tokenizer; build: model class and config of a tokenizer and values.

    The same arguments give the same bits. Returns the number of parameters. Raises UserError for a
    shape that the engine cannot run.

    The shape was tuned on easy algebra, for a minute of supervised training on two cores: three
    wide layers are better than four narrow ones at equal cost, and the usual init_std of 0.02
    learns half as much at this width.
    """
    check_shape(hidden, heads, kv_heads)
    tokenizer = make_tokenizer(max_tokens, characters, others, template, texts)
    values = {
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
    }
    model_class, config = (build or _qwen3)(tokenizer, values)
    return save_random(model_class, config, tokenizer, folder, seed)


def save_random(
    model_class: Any, config: Any, tokenizer: Any, folder: str | Path, seed: int
) -> int:
    """Write a model of random weights and its tokenizer; return the number of parameters. The pad
    token has weights too. Where they are 0, RMSNorm multiplies a gradient by 1,000."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        rows = model.get_input_embeddings().weight.data
        rows[tokenizer.pad_token_id] = torch.randn(rows.shape[1]) * rows.std()
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def _qwen3(_: Any, values: dict[str, Any]) -> Any:
    own = {"head_dim": values["hidden_size"] // values["num_attention_heads"], "dtype": "float32"}
    return Qwen3ForCausalLM, Qwen3Config(**values, **own, tie_word_embeddings=True)


def check_shape(hidden: int, heads: int, kv_heads: int) -> None:
    """Raise UserError for heads that do not fit a model of that width."""
    if hidden % (2 * heads) or heads % kv_heads or hidden // heads < SMALLEST_HEAD:
        raise UserError(
            "the heads do not fit the model",
            where="hidden, heads, kv_heads",
            found=f"{hidden}, {heads}, {kv_heads}",
            expected=f"heads of equal, even size, at least {SMALLEST_HEAD}, "
            "and equally many of them for each of kv_heads",
            next="e.g. --hidden 64 --heads 4 --kv-heads 2",
        )


def make_tokenizer(
    max_tokens: int = 256,
    characters: Sequence[str] = CHARACTERS,
    others: Sequence[str] = (),
    template: str = TEMPLATE,
    texts: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Make a tokenizer of one token a character, a role, the end of a turn, and the answer marker.

    Any other character is `<unk>`. others: further special tokens, of a template that writes them.
    texts: BPE learns tokens from them, in place of the answer marker. Digits have their own tokens.
    """
    special = [PAD, *(f"<|{role}|>" for role in ROLES), END, UNKNOWN, *others]
    vocabulary = {token: i for i, token in enumerate([*special, ANSWER, *characters])}
    # BPE without merges splits a text into its characters, and unlike WordLevel needs no
    # pre-tokenizer to do so.
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    if texts:
        core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d+|\D+"), "isolated")
        core.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=len(vocabulary) + LEARNED,
                min_frequency=2,
                special_tokens=special,
                initial_alphabet=list(characters),
                show_progress=False,
            ),
        )
    core.decoder = decoders.Fuse()
    core.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    if not texts:
        core.add_tokens([AddedToken(ANSWER, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=template,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )
