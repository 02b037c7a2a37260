"""A model directory's tokenizer and its decoding of tokens, the same in every process.

The driver's renderer and the engine of a rollout worker share it, so a completion's text does not
depend on its process. Knows no chat template and no weights; transformers is imported when a
tokenizer is loaded.
"""

from pathlib import Path
from typing import Any

from tandem.model.config_file import first_line
from tandem.runtime.errors import UserError
from tandem.types import Array


def load_tokenizer(model_path: str) -> Any:
    """Load the tokenizer of a model directory or hub name. Raises UserError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    # a damaged file may raise anything: KeyError, TypeError, Exception
    except Exception as error:
        raise _cannot_load(model_path, first_line(error)) from None


def decode_text(tokenizer: Any, tokens: Array) -> str:
    """Decode tokens int64 [T] to text, without special tokens."""
    ids = tokens.tolist()
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _cannot_load(model_path: str, found: str) -> UserError:
    local = Path(model_path).is_dir()
    return UserError(
        "the tokenizer cannot be loaded",
        where=model_path,
        found=found,
        expected="the tokenizer files of a model"
        if local
        else "a directory here, or a hub name and a network",
        next=f"copy the tokenizer files again into {model_path}"
        if local
        else "set model.path to a model directory",
    )
