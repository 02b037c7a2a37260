"""The language model in a checkpoint that also reads images or sound, as a model of its own.

Vision and audio parts are neither loaded nor trained, and not exported. Kinds that run with their
parts for images (paths.py) are not taken apart. This file knows no run.
"""

import logging
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

# Names of weights in such checkpoints, and of the language model alone: patterns as transformers'
# `key_mapping` takes them. Transformers has written the first ones since version 5, others before.
NAMES = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.text_model\.": "model.",  # Idefics2
}

SCORES = "ForSequenceClassification"


def text_part(config: Any, where: str) -> Any:
    """Return the config of the language model in a transformers config of several parts, or the
    config itself if transformers has no causal language model of that kind.

    where: the model's config key and path, for a note to the user, once in a process.
    """
    text = config.get_text_config()
    if text is config or not is_language_model(text.model_type):
        return config
    # the projection to the vocabulary is outside of the part that its config describes
    heads = [name for name in config.architectures or [] if name.endswith(SCORES)]
    text.architectures = heads or None  # of a reward model, which has no tokens to say
    tied = getattr(config, "tie_word_embeddings", False)  # those that read sound may lack it
    text.tie_word_embeddings = bool(text.tie_word_embeddings or tied)
    _tell(where, config.model_type, text.model_type)
    return text


def is_language_model(model_type: Any) -> bool:
    """Tell whether transformers has a causal language model of this type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return isinstance(model_type, str) and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


@cache
def _tell(where: str, whole: str, part: str) -> None:
    logger.warning(
        "%s (%s) also reads images or sound: its language model (%s) runs without those parts, "
        "and is exported without them",
        where,
        whole,
        part,
    )


def forget_names(module: Any) -> None:
    """Have a module that was loaded by NAMES exported by its own names, as a model of its own."""
    del module._weight_conversions
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if head is not None:  # files with both have untied weights, whatever a config says
        module.config.tie_word_embeddings = head.weight is embedding.weight
