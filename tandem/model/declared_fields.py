"""The fields of a config.json that its config class declares: nothing else in it reaches
transformers, which takes many keys as instructions. Of a model of several parts (text, vision) the
same holds for the config of each part."""

import dataclasses
from typing import Any

# Keys that transformers still reads although no config class declares them.
OLDER_NAMES = {
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "num_labels",
    "torch_dtype",
    "tie_word_embeddings",
    "sliding_window_pattern",
    "rope_local_base_freq",
    "rotary_pct",
    "rotary_emb_base",
    "rotary_dim",
    "no_rope_layer_interval",
    "first_k_dense_replace",
    "moe_layer_freq",
    "block_ff_dim",
    "tie_embedding",
    "global_head_dim",
    "num_global_key_value_heads",
    "per_layer_config",
}
TEXT = "text_config"


def plain_config(model_type: Any, values: dict[str, Any]) -> Any:
    """Make the transformers config of a model type from the declared ones of some values."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    kept, parts = _declared(config_class, values), _part_classes(config_class, values)
    for name, part in parts.items():
        if isinstance(own := kept.get(name), dict):
            types = {"model_type": own["model_type"]} if "model_type" in own else {}
            kept[name] = types | _declared(part, own)
    if TEXT in parts and kept.get(TEXT) is None:  # older files have the text's beside the others
        kept = _declared(parts[TEXT], values) | kept
    return config_class.from_dict(kept)


def _declared(config_class: Any, values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(config_class)} | OLDER_NAMES
    names |= config_class.attribute_map.keys() | set(config_class.attribute_map.values())
    return {name: value for name, value in values.items() if name in names}


def _part_classes(config_class: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the config classes of a model's parts by the name of their field."""
    from transformers import CONFIG_MAPPING, AutoConfig

    found = {}
    for name, spec in (getattr(config_class, "sub_configs_defaults", None) or {}).items():
        part = getattr(spec, "config_class", spec)  # transformers' own, of either kind
        if part is AutoConfig:
            own = values.get(name)
            own_type = own.get("model_type") if isinstance(own, dict) else None
            part = CONFIG_MAPPING[own_type or spec.model_type]
        found[name] = part
    return found
