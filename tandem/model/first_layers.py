"""A model's first layers, as few as hold every kind: the config of a small model of its shapes.

Few tokens would pass by what begins beyond a number of a config, as windows and chunks of
attention: such numbers are made low. No list says which they are: a number is one if the model has
the same shapes with a smaller one, and its name is not that of a size, a count or a scale.
"""

import copy
import re
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tandem.model.custom_code import from_config

POSITIONS, EXPERTS = 512, 8
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
WINDOW = 60  # the highest threshold of a trial
# Positions change rotary embeddings, alike in every pass; rope.positions_of has the exceptions.
OTHERS = re.compile("head|dim|intermediate|layer|expert|scalar|position|_id")


def first_layers(config: Any) -> Any:
    """Make the config of the first layers, as many as hold every kind; thresholds are low
    enough to be passed, experts few."""
    config, kinds = copy.deepcopy(config), _kinds_of_layers(config)
    layers, count = config.num_hidden_layers, 1 + max(kinds.index(kind) for kind in kinds)
    if shared := getattr(config, "num_kv_shared_layers", None):  # the last ones
        config.num_kv_shared_layers = max(0, count - (layers - shared))
    config.num_hidden_layers = count
    for name, value in list(vars(config).items()):
        limits = isinstance(value, list) and any(isinstance(one, float) for one in value)
        if isinstance(value, list) and len(value) == layers and not limits:
            setattr(config, name, value[:count])
    if getattr(config, "max_position_embeddings", None):  # a learned table may be short
        config.max_position_embeddings = max(config.max_position_embeddings, POSITIONS)
    for name in EXPERT_COUNTS:
        if isinstance(number := getattr(config, name, None), int):
            # a router may choose among groups by their two best
            groups = getattr(config, "n_group", None) or 1
            chosen = getattr(config, "num_experts_per_tok", None)
            chosen = chosen or getattr(config, "top_k_experts", None) or 1
            fewest = max(EXPERTS, chosen, 2 * groups)
            setattr(config, name, min(number, fewest))
    lower_thresholds(config, WINDOW)
    return config


def _kinds_of_layers(config: Any) -> list[str]:
    """Describe each layer of a config by the types, shapes and switches of its parts, and by the
    lists of one entry a layer."""
    layers = config.num_hidden_layers
    lists = [v for v in vars(config).values() if isinstance(v, list) and len(v) == layers]
    lists = [v for v in lists if v != list(range(layers))]  # which only numbers them
    with torch.device("meta"):
        module = from_config(AutoModelForCausalLM, config)
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) == layers:
            return [
                f"{_description(layer)} {[value[number] for value in lists]}"
                for number, layer in enumerate(part)
            ]
    return [str(number) for number in range(layers)]  # any may be another one


def _description(layer: nn.Module) -> str:
    return str(
        [
            (
                type(part).__name__,
                [tuple(weight.shape) for weight in part.parameters(recurse=False)],
                [value for value in vars(part).values() if isinstance(value, bool)],
            )
            for part in layer.modules()
        ]
    )


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
