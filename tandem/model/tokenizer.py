"""Tokens to text, the same in every process: a model directory's tokenizer, and how it decodes.

The driver's renderer and the engine of a rollout worker share it, so that a completion's text does
not depend on where it was made. Knows no chat template and no weights; transformers is imported
when a tokenizer is loaded.
"""

from pathlib import Path
from typing import Any

from tandem.runtime.errors import UserError
from tandem.types import Array


def load_tokenizer(model_path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    # a damaged file raises whatever its reader trips over: KeyError, TypeError, Exception
    except Exception as error:
        expected, advice = (
            "the tokenizer files of a model",
            f"copy the tokenizer files again into {model_path}",
        )
        if not Path(model_path).is_dir():
            expected, advice = (
                "a directory here, or a hub name and a network",
                "set model.path to a model directory",
            )
        found = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise UserError(
            "the tokenizer cannot be loaded",
            where=model_path,
            found=found,
            expected=expected,
            next=advice,
        ) from None


def decode_text(tokenizer: Any, tokens: Array) -> str:
    """The text of the tokens, without special tokens."""
    ids = tokens.tolist()
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
