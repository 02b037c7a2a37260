"""Numbers of a transformers config from which on a model computes otherwise, as windows and chunks
of attention, made low: a trial has few tokens, and would pass by what begins beyond them.

No list says which they are: a number is one if the model has the same shapes with a smaller one,
and its name is not that of a size, a count or a scale.
"""

import copy
import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tandem.model.custom_code import from_config

# Positions change rotary embeddings, alike in every pass; rope.positions_of has the exceptions.
OTHERS = re.compile("head|dim|intermediate|layer|expert|scalar|position|_id")


def lower_thresholds(config: Any, most: int) -> None:
    """Set each threshold of a config above `most` to it, in place."""
    kept = {config.attribute_map.get("max_position_embeddings")}
    shapes = _shapes(config)
    for name, value in list(vars(config).items()):
        lower = _lowered(value, most)
        if name not in kept and not OTHERS.search(name) and lower != value:
            other = copy.deepcopy(config)
            setattr(other, name, lower)
            if _shapes(other) == shapes:
                setattr(config, name, lower)


def _lowered(value: Any, most: int) -> Any:
    if isinstance(value, list):
        return [_lowered(one, most) for one in value]
    return min(value, most) if type(value) is int else value


def _shapes(config: Any) -> list[torch.Size] | None:
    """List the shapes of a model's tensors; None if there is no such model."""
    try:
        with torch.device("meta"):
            module = from_config(AutoModelForCausalLM, config)
    except Exception:  # any class of any model is made here
        return None
    return [tensor.shape for tensor in (*module.parameters(), *module.buffers())]
