"""A model directory's config.json read as data: nothing that it says can run code, and its numbers
are plausible.

transformers takes many keys of that file as instructions: Python files to import (auto_map),
attention kernels to fetch, quantizers, other weight files. So the file is read here, its model type
must be one that Tandem knows, and of its keys only the fields that this type's config declares are
handed on. It does not know weights, nor what can run exactly (load.py).
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from tandem.runtime.errors import UserError

CONFIG, ADAPTER = "config.json", "adapter_config.json"
MAX_BYTES = 16 << 20
# of anything that config.json counts; the largest vocabulary has a million tokens
MAX_LAYERS, MAX_SIZE = 4096, 1 << 24
# Keys that transformers still reads although the config's class does not declare them.
OLDER_NAMES = {
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "num_labels",
    "torch_dtype",
}
REFUSED = {
    "quantization_config": "quantized weights",
    "compression_config": "quantized weights",
    "per_layer_config": "layers of different shapes",
}
_COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "head_dim",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
)


def read_config(path: str, key: str, architectures: tuple[str, ...]) -> Any:
    """The transformers config of a model directory or hub name; key: the config key that names it.

    Raises UserError for a file that cannot be read, and for a model that is not of one of the
    architectures.
    """
    where = f"{key} = {path}"
    values = read_json(path, CONFIG, where)
    if values is None:
        here = (
            "no config.json in it"
            if Path(path).is_dir()
            else "nothing: no such model on the hub, or no way to it from here"
        )
        raise _unreadable(where, here)
    kind = values.get("model_type")
    if kind not in architectures or (kind == "mistral" and "layer_types" in values):
        found = f"architecture {'ministral' if kind == 'mistral' else str(kind)[:60]}"
        raise cannot_run(where, [found], architectures)
    reasons = [f"{name}: {why}" for name, why in REFUSED.items() if values.get(name) is not None]
    if reasons:
        raise cannot_run(where, reasons, architectures)
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    names = {field.name for field in dataclasses.fields(made)} | OLDER_NAMES
    names |= made.attribute_map.keys() | set(made.attribute_map.values())
    try:
        config = made.from_dict({name: value for name, value in values.items() if name in names})
        mistakes = _implausible(config)
    except Exception as error:  # transformers trips over a wrong value wherever it first meets it
        raise _unreadable(where, first_line(error)) from None
    if mistakes:
        raise _unreadable(where, "; ".join(mistakes))
    return config


def cannot_run(where: str, reasons: list[str], architectures: tuple[str, ...]) -> UserError:
    return UserError(
        "this model cannot run exactly",
        where=where,
        found="; ".join(reasons),
        expected=f"one of {', '.join(architectures)} with float weights, SiLU and a static rotary embedding",
    )


def read_json(
    path: str, name: str, where: str, what: str = "model's config"
) -> dict[str, Any] | None:
    """The JSON object in a file of a model directory or hub name; None where there is no such file.
    Raises UserError."""
    try:
        file = _find(path, name)
        if file is None:
            return None
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"{name} is larger than {MAX_BYTES >> 20} MiB")
        values = json.loads(file.read_bytes())
    except RecursionError:
        raise _unreadable(where, f"{name} is nested too deep", what) from None
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not UTF-8
        raise _unreadable(where, first_line(error), what) from None
    if not isinstance(values, dict):
        raise _unreadable(where, f"{name} holds no JSON object", what)
    return values


def refuse_adapter(path: str, where: str) -> None:
    """Raises UserError for a model with an adapter beside it: transformers would load and merge it,
    and import what it names."""
    if _find(path, ADAPTER) is not None:
        raise UserError(
            "the model has an adapter beside its weights",
            where=f"{where}, {ADAPTER}",
            expected="plain weights",
            next="merge the adapter into the weights with PEFT, or move its files out of the directory",
        )


def _find(path: str, name: str) -> Path | None:
    """The file of a local directory, or of a hub name in the local cache, where it is fetched to.
    Raises OSError."""
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.is_file() else None
    from transformers.utils import cached_file

    found = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=name == CONFIG,
    )
    return None if found is None else Path(found)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:500]


def _unreadable(where: str, found: str, what: str = "model's config") -> UserError:
    return UserError(
        f"the {what} cannot be read",
        where=where,
        found=found,
        expected="a file as transformers writes it, or a hub name that can be reached from here",
        next="name a model directory; or, of a hub name, fetch it where there is a network and set HF_HUB_OFFLINE=1 here",
    )


def _implausible(config: Any) -> list[str]:
    """List what no model can have, e.g. ["0 num_attention_heads"]."""
    import torch

    values = config.to_dict()
    mistakes = [
        f"{values[name]!r:.60} {name}"
        for name in _COUNTS
        if values.get(name) is not None
        and not _is_count(values[name], MAX_LAYERS if "layers" in name else MAX_SIZE)
    ]
    if mistakes:
        return mistakes
    heads, groups, layers = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.num_hidden_layers,
    )
    if heads % groups:
        mistakes.append(f"{heads} query heads for {groups} key/value heads")
    if config.dtype is not None and not isinstance(config.dtype, torch.dtype):
        mistakes.append(f"dtype {config.dtype!r:.60}")
    if not (config.architectures is None or _is_list_of(str, config.architectures)):
        mistakes.append(f"architectures {config.architectures!r:.60}")
    rope = values.get("rope_parameters") or {}
    if not all(_is_positive(rope[name]) for name in ("rope_theta", "factor") if name in rope):
        mistakes.append(f"rope_parameters {rope!r:.60}")
    if any(isinstance(value, dict) for value in rope.values()):
        mistakes.append("rope_parameters for kinds of layers")
    kinds = values.get("layer_types")
    if kinds is not None and (
        len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}
    ):
        mistakes.append(f"layer_types {str(kinds)[:60]} for {layers} layers")
    window = values.get("sliding_window")
    if window is not None and not _is_count(window, MAX_SIZE):
        mistakes.append(f"sliding_window {window!r:.60}")
    return mistakes


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 < value <= most


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _is_list_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)
