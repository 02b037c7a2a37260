"""Rotary embeddings of a transformers config, and how many positions a sequence may have.

longrope turns the tokens of a pass by its longest position, but only beyond a length: up to it, it
is as static as others. So do the kinds of `dynamic`, beyond all positions that a sequence may have.
"""

from typing import Any

STATIC = ("default", "linear", "llama3", "yarn")  # kinds that do not look at the length
MAX_POSITIONS = 1 << 20  # of a model that has no limit of its own


def ropes_of(config: Any) -> list[dict[str, Any]]:
    """List the parameters of the rotary embeddings: one for all layers, one for each kind of
    layer, or none."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope[kind] for kind in kinds_with_rope(config)] or [rope]


def kinds_with_rope(config: Any) -> set[str]:
    """Return the kinds of layers that have rotary embeddings of their own."""
    rope = getattr(config, "rope_parameters", None) or {}
    return {kind for kind, value in rope.items() if isinstance(value, dict)}


def has_static_ropes(config: Any) -> bool:
    """Tell whether a token is turned alike in passes of any length."""
    return all(rope.get("rope_type", "default") in STATIC for rope in ropes_of(config))


def positions_of(config: Any) -> int:
    """Return how many tokens a sequence may have: of longrope (arXiv 2402.13753) as many as are
    turned by its short factors, as one more turns all tokens of its pass by the long ones."""
    config = config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None) or MAX_POSITIONS]
    for rope in ropes_of(config):
        if rope.get("rope_type") == "longrope":
            limits.append(rope.get("original_max_position_embeddings") or limits[0])
    return int(min(limits))
