"""transformers' own module of a model directory, with its weights: safetensors only, as exported.

A hub name's files are not checked, but transformers fetches safetensors only.
"""

import copy
from pathlib import Path
from typing import Any

from torch import nn

from tandem.model.config_file import (
    CONFIG,
    HeadKind,
    check_model,
    find_file,
    first_line,
    is_language_model,
    is_text_part,
    read_json,
)
from tandem.model.custom_code import is_custom
from tandem.model.placement import Placement
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import UserError

ADAPTER = "adapter_config.json"
SUMS = "SHA256SUMS"  # beside exported weights
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
CONVERT = """where you trust the file, convert it: python -c 'from transformers import \
AutoModelForCausalLM as M; M.from_pretrained("{0}").save_pretrained("{0}-safetensors")', and copy \
the tokenizer files beside it"""
# Names of weights in checkpoints that also read images or sound, and of their language model alone:
# patterns as transformers' `key_mapping` takes them. Transformers has written the first ones since
# version 5, others before.
NAMES = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.text_model\.": "model.",  # Idefics2
}


def check_weights(path: str) -> None:
    """Raise UserError unless a directory has weights in safetensors, and no adapter beside them."""
    if find_file(path, ADAPTER) is not None:  # which transformers would load, and merge
        cure = "merge the adapter into the weights with PEFT, or move its files elsewhere"
        raise cannot_load(path, f"{ADAPTER} beside the weights", cure)
    folder = Path(path)
    if not folder.is_dir() or any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        return
    if pickles := sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES):
        found = f"{pickles[0]}, a format that can run code when it is loaded"
        raise cannot_load(path, found, CONVERT.format(folder))
    raise cannot_load(path, f"no {WEIGHTS} and no {INDEX}")


def check_sums(path: str) -> None:
    """Raise UserError if weights differ from SHA256SUMS; a directory without it passes."""
    folder = Path(path)
    lines = (folder / SUMS).read_text(errors="replace") if (folder / SUMS).is_file() else ""
    for line in lines.splitlines():
        recorded, _, name = line.partition("  ")
        if name.endswith(".safetensors"):
            found = file_hash(folder / name) if (folder / name).is_file() else "no such file"
            if found != recorded.lower():
                raise UserError(
                    "the weights are not those that were exported",
                    where=str(folder / name),
                    found=found,
                    expected=f"{recorded}, as in {SUMS}",
                    next=f"export them again; or remove {SUMS} if they were changed on purpose",
                )


def cannot_load(
    path: str, found: str, cure: str = "copy or export the model's files again"
) -> UserError:
    return UserError(
        "the model cannot be loaded",
        where=path,
        found=found,
        expected="weights in safetensors beside config.json",
        next=cure,
    )


def stock_class(head: HeadKind, config: Any) -> Any:
    """Return the Auto class of a model's module."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if head == "value":
        return AutoModelForSequenceClassification
    is_text = is_custom(config) or is_language_model(config.model_type)
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def import_stock(path: str) -> None:
    """Import transformers' module of a model, of the local cache if it has a hub name, and its
    tokenizers, without an object of either. Raises what they do."""
    from transformers import AutoTokenizer  # noqa: F401
    from transformers.utils import cached_file

    if not Path(path).is_dir():
        path = str(Path(cached_file(path, CONFIG, local_files_only=True)).parent)
    config = check_model(path)
    stock_class("tokens", config)._model_mapping[type(config)]


def load_stock(path: str, config: Any, head: HeadKind, place: Placement) -> Any:
    """Load transformers' module, using only plain fields of config.json and safetensors.

    Raises UserError for weights that are damaged or missing.
    """
    check_weights(path)
    check_sums(path)
    if head == "value":
        config.num_labels = 1
    quantizer = (read_json(path, CONFIG) or {}).get("quantization_config")
    is_part = is_text_part(path, config)
    if quantizer is not None:  # of config_file.DEQUANTIZED
        config = copy.deepcopy(config)
        config.quantization_config = {**quantizer, "dequantize": True}
    try:
        module, report = stock_class(head, config).from_pretrained(
            path,
            config=config,
            dtype=place.dtype,
            trust_remote_code=is_custom(config),
            use_safetensors=True,
            output_loading_info=True,
            key_mapping=NAMES if is_part else None,
        )
    except Exception as error:  # a damaged file may raise anything
        raise cannot_load(path, first_line(error)) from None
    missing = set(report["missing_keys"])  # transformers would fill them with random numbers
    if head == "value" and "score.weight" in missing:
        missing.remove("score.weight")
        nn.init.zeros_(module.score.weight)
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise cannot_load(path, f"no weights for {len(missing)} parameters: {names}")
    if is_part or quantizer is not None:
        # by which an export would have the names of the whole, or be quantized again
        del module._weight_conversions
    output = module.get_output_embeddings()
    if is_part and output is not None:  # files with both are untied, whatever a config says
        module.config.tie_word_embeddings = output.weight is module.get_input_embeddings().weight
    return module.to(place.device)
