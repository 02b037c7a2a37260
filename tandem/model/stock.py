"""transformers' own module of a model directory, with its weights."""

import copy
from pathlib import Path
from typing import Any

from torch import nn

from tandem.model.config_file import (
    CONFIG,
    HeadKind,
    check_model,
    first_line,
    is_text_part,
    read_json,
)
from tandem.model.custom_code import is_custom
from tandem.model.placement import Placement
from tandem.model.text_part import NAMES, forget_names, is_language_model
from tandem.model.weight_files import cannot_load


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
    if is_part:
        forget_names(module)
    if quantizer is not None:
        del module._weight_conversions  # by which an export would be quantized again
    return module.to(place.device)
