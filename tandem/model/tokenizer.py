"""A model directory's tokenizer and its decoding of tokens, the same in every process.

The driver's renderer and the engine of a rollout worker share it, so a completion's text does not
depend on its process. Knows no chat template and no weights; transformers is imported when a
tokenizer is loaded.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from tandem.model.config_file import CONFIG, first_line, read_json
from tandem.model.custom_code import is_allowed, require_allowed
from tandem.runtime.errors import UserError
from tandem.runtime.image_tokens import IMAGE
from tandem.types import Array

VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


def load_tokenizer(model_path: str) -> Any:
    """Load the tokenizer of a model directory or hub name. Raises UserError."""
    from transformers import AutoTokenizer

    if is_allowed():
        _require_code(model_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=is_allowed())
        tokenizer.init_kwargs.pop("local_files_only", None)  # or a save keeps HF_HUB_OFFLINE
        return tokenizer
    # a damaged file may raise anything: KeyError, TypeError, Exception
    except Exception as error:
        _require_code(model_path)
        raise UserError(
            "the tokenizer cannot be loaded",
            where=model_path,
            found=first_line(error),
            expected="the tokenizer files of a model",
            next=f"copy the tokenizer files again into {model_path}, or name another model",
        ) from None


def _require_code(model_path: str) -> None:
    """Raise UserError if the tokenizer is of Python files that may not run. transformers reads the
    model's config for it, too."""
    for name in ("tokenizer_config.json", *([CONFIG] if is_allowed() else [])):
        values = read_json(model_path, name) or {}
        if "auto_map" in values:
            require_allowed(model_path, values, f"{model_path}, {name}")


def require_tokenizer(model_path: str) -> None:
    """Raise UserError for a directory without a tokenizer: AutoTokenizer would make an empty one of
    the model's family, and say nothing."""
    directory = Path(model_path)
    if directory.is_dir() and not any((directory / name).is_file() for name in VOCABULARY_FILES):
        raise UserError(
            "the model directory has no tokenizer",
            where=model_path,
            expected=f"one of {', '.join(VOCABULARY_FILES)}",
            next=f"copy the tokenizer files of the base model into {model_path}",
        )


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: Any) -> dict[int, tuple[str, str]]:
    """Return a tokenizer's special tokens, and what each says in a text: marks of tool calls and of
    thoughts say something."""
    from tandem.model.call_forms import spoken

    added = tokenizer.added_tokens_decoder
    return {n: (str(t), spoken(str(t))) for n, t in added.items() if t.special}


def decode_text(tokenizer: Any, tokens: Array) -> str:
    """Decode tokens int64 [T] to text, without images and the special tokens that say nothing."""
    ids = tokens[tokens < IMAGE].tolist()
    special = _special_tokens(tokenizer)
    saying = {special[n] for n in ids if n in special and special[n][1]}
    if not saying:
        return _decode(tokenizer, ids, skip_special_tokens=True)
    text = _decode(tokenizer, [n for n in ids if n not in special or special[n][1]])
    for token, spelled in saying:
        text = text.replace(token, spelled)
    return text


def _decode(tokenizer: Any, ids: list[int], **options: Any) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False, **options))
