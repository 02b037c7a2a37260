"""A model directory's config.json, read as data; a model of a kind that cannot run is refused.

transformers takes some keys of that file as instructions: Python files to import (auto_map),
attention kernels to fetch, quantizers, other weight files. So the file is read here without them,
its model type must be a causal language model of the installed transformers, and its numbers must
be plausible. This file knows no weights.
"""

import json
import logging
import math
import re
from pathlib import Path
from typing import Any, Literal

from tandem.model import custom_code
from tandem.model.quantized_files import require_float
from tandem.model.rope import has_static_ropes, kinds_with_rope, ropes_of
from tandem.model.text_part import is_language_model, text_part
from tandem.runtime.errors import UserError

logger = logging.getLogger(__name__)

HeadKind = Literal["tokens", "value"]
# Those that run through Tandem's own layer (layers.py); all others through general.py.
LEAN_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
# Those of images and text that run, inexactly, through image_model.py.
IMAGE_ARCHITECTURES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3")
TEXT = "text_config"
# keys that tell transformers what to fetch or how to run, in a model's config or that of a part
INSTRUCTIONS = re.compile(
    "auto_map|transformers_weights|.*_implementation(_internal)?"
    "|(fusion|distributed|quantization|compression)_config"
)
CONFIG, ADAPTER = "config.json", "adapter_config.json"
BIAS_SIZE = {"bloom": 8}  # numbers beside those of a head, for linear biases (alibi.py)
# Limits of the counts in config.json; the largest vocabulary has a million tokens.
MAX_LAYERS, MAX_SIZE = 4096, 1 << 24
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


def check_model(path: str, key: str = "model.path", *, head: HeadKind = "tokens") -> Any:
    """Read a model's transformers config, without its weights.

    key: the config key that names the model. head: as in load_model; a value model may start from a
    language model, but not the reverse. Raises UserError for a model that is missing, or of a kind
    that no path runs.
    """
    if not path:
        raise UserError(
            "no model is named",
            where=key,
            expected="a Hugging Face directory or hub name",
            next="tandem train RECIPE model.path=DIR",
        )
    folder = Path(path)
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    looks_local = looks_local or folder.exists() or folder.parent.is_dir()
    if looks_local and not (folder / "config.json").is_file():
        raise _no_model(path, key)
    if not folder.is_dir():
        logger.warning("no directory %s here: looking for it on the Hugging Face hub", path)
    config = _read_config(path, f"{key} = {path}")
    if head == "tokens" and (config.architectures or [""])[0].endswith("ForSequenceClassification"):
        raise UserError(
            "this is a reward model, which has no tokens to say",
            where=f"{key} = {path}",
            found=config.architectures[0],
            expected="a causal language model",
            next="a reward model can be the critic: critic.path",
        )
    return config


def _read_config(path: str, where: str) -> Any:
    """Make the transformers config of a causal language model from the declared fields."""
    values = read_json(path, CONFIG, where)
    if values is None:
        found = "no such directory here, and no such model on the hub or no way to it from here"
        raise _unreadable(path, CONFIG, where, found)
    model_type = values.get("model_type")
    parts = [part for part in (values, values.get(TEXT)) if isinstance(part, dict)]
    own = custom_code.brings_model(values) and (
        custom_code.is_allowed() or not _is_language_model(model_type)
    )
    if own:
        custom_code.require_allowed(path, values, f"{where}, {CONFIG}")
    elif not (_is_language_model(model_type) or parts[1:]):
        raise _not_exact(where, [f"architecture {model_type!s:.60}"])
    for part in parts:
        require_float(part, f"{where}, {CONFIG}")
    if not own and any(p.get("model_type") == "mistral" and "layer_types" in p for p in parts):
        raise _not_exact(where, ["architecture ministral"])
    try:
        config = custom_code.custom_config(path) if own else _plain_config(model_type, values)
        if not (own or reads_images(config)):
            whole, config = config, text_part(config, where)
            if config is not whole and any(part.get("quantization_config") for part in parts):
                raise _not_exact(where, ["quantized weights of a model that also reads images"])
        if not reads_images(config) and config.get_text_config() is not config:
            what = "whose language model transformers cannot run by itself"
            raise _not_exact(where, [f"architecture {model_type}, {what}"])
        mistakes = _implausible_values(config.get_text_config())
    except UserError:
        raise
    except Exception as error:  # transformers raises wherever it first uses a wrong value
        raise _unreadable(path, CONFIG, where, first_line(error)) from None
    if mistakes:
        raise _unreadable(path, CONFIG, where, "; ".join(mistakes))
    return config


def _plain_config(model_type: Any, values: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    def plain(part: dict[str, Any]) -> dict[str, Any]:
        return {
            name: plain(value) if isinstance(value, dict) else value
            for name, value in part.items()
            if not INSTRUCTIONS.fullmatch(name)
        }

    return CONFIG_MAPPING[model_type].from_dict(plain(values))


def _is_language_model(model_type: Any) -> bool:
    """Tell whether a model of this type may run, by its name, without a look at most models."""
    known = model_type in (*LEAN_ARCHITECTURES, *IMAGE_ARCHITECTURES)
    return known or is_language_model(model_type)


def is_text_part(path: str, config: Any) -> bool:
    """Tell whether check_model's config is of a part of the model at path, its language model."""
    values = read_json(path, CONFIG) or {}
    if custom_code.is_custom(config):
        return False
    return bool(values.get("model_type", config.model_type) != config.model_type)


def read_json(
    path: str, name: str, where: str = "", what: str = "model's config"
) -> dict[str, Any] | None:
    """Read the JSON object in a file of a model directory or hub name; None without such a file.

    Raises UserError for a file that cannot be read; where: of the model, in the message, by default
    its path; what: the file's name there.
    """
    where, found = where or path, "no JSON object"
    try:
        file = find_file(path, name)
        if file is None:
            return None
        values = json.loads(file.read_bytes(), object_hook=special_float)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not JSON, or not UTF-8
        begin = "" if Path(path).is_dir() else "no such directory here, and of the hub: "
        values, found = None, begin + first_line(error)
    if not isinstance(values, dict):
        raise _unreadable(path, name, where, found, what)
    return values


def special_float(values: dict[str, Any]) -> Any:
    """Read an object that transformers writes for infinity, which JSON has no number for."""
    return float(str(values["__float__"])) if values.keys() == {"__float__"} else values


def refuse_adapter(path: str, where: str) -> None:
    """Raise UserError for an adapter beside the model.

    transformers would load and merge it, and import the modules that it names.
    """
    if find_file(path, ADAPTER) is not None:
        raise UserError(
            "the model has an adapter beside its weights",
            where=f"{where}, {ADAPTER}",
            expected="plain weights",
            next="merge the adapter into the weights with PEFT, "
            "or move its files out of the directory",
        )


def find_file(path: str, name: str) -> Path | None:
    """Find a file of a local directory, or of a hub name, fetched to the local cache.

    Raises OSError.
    """
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.is_file() else None
    from transformers.utils import cached_file

    if name == CONFIG:  # which is the first file that is asked for
        _require_hub(path)
    found = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=name == CONFIG,
    )
    return None if found is None else Path(found)


def _require_hub(path: str) -> None:
    """Raise OSError if the hub has to be reached and cannot be: its client would try for half a
    minute."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE or try_to_load_from_cache(path, CONFIG):
        return
    url = hf_hub_url(path, CONFIG)
    try:
        get_hf_file_metadata(url)
    except HfHubHTTPError:
        pass  # it was reached, and the download tells what it says
    except Exception as error:  # of httpx or httpx2, by the version of the client
        raise OSError(f"it cannot be reached: {error}") from None


def first_line(error: Exception) -> str:
    """Describe an error in one line, e.g. "KeyError: 'vocab'"."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:500]


def _implausible_values(config: Any) -> list[str]:
    """List values that no model can have, e.g. ["0 num_attention_heads"]."""
    import torch

    values = config.to_dict()
    if isinstance(inner := values.get("intermediate_size"), list):  # of each layer (Gemma 3n)
        values["intermediate_size"] = max(inner)
    mistakes = [
        f"{values[name]!r:.60} {name}"
        for name in _COUNTS
        if values.get(name) is not None
        and not _is_count(values[name], MAX_LAYERS if "layers" in name else MAX_SIZE)
    ]
    if mistakes:
        return mistakes
    heads, kv_heads = heads_of(config), kv_heads_of(config)
    if heads and heads % kv_heads:
        mistakes.append(f"{heads} query heads for {kv_heads} key/value heads")
    if config.dtype is not None and not isinstance(config.dtype, torch.dtype):
        mistakes.append(f"dtype {config.dtype!r:.60}")
    names = config.architectures
    if not (names is None or (isinstance(names, list) and all(isinstance(n, str) for n in names))):
        mistakes.append(f"architectures {names!r:.60}")
    for rope in ropes_of(config):
        if not all(_is_positive(rope[name]) for name in ("rope_theta", "factor") if name in rope):
            mistakes.append(f"rope_parameters {rope!r:.60}")
    types, layers = values.get("layer_types"), config.num_hidden_layers
    kinds = kinds_with_rope(config)
    if kinds and config.model_type in LEAN_ARCHITECTURES:  # transformers would ignore them
        mistakes.append(f"rope_parameters for kinds of layers, {', '.join(sorted(kinds))[:60]}")
    if types is not None and (
        len(types) != layers
        or (is_lean(config) and not set(types) <= {"full_attention", "sliding_attention"})
    ):
        mistakes.append(f"layer_types {str(types)[:60]} for {layers} layers")
    window = values.get("sliding_window")
    unused = window == 0 and not is_lean(config)  # Qwen2-MoE's without windows
    if window is not None and not unused and not _is_count(window, MAX_SIZE):
        mistakes.append(f"sliding_window {window!r:.60}")
    return mistakes


def why_not_exact(config: Any) -> str:
    """Say why no exact path can run this transformers config; "" if one may.

    Of a model that is not lean, its trial decides (inexact_trial.why_inexact)."""
    if not heads_of(config):
        return "no attention heads"
    if (size := head_size(config)) < 8:
        return f"head size {size} (at least 8: smaller matmuls take another kernel)"
    return ""


def is_lean(config: Any) -> bool:
    """Tell whether Tandem's own layer runs this model, and not transformers' forward pass."""
    known = config.model_type in LEAN_ARCHITECTURES and config.hidden_act == "silu"
    plain = not (config.is_heterogeneous or custom_code.is_custom(config))
    own = known and has_static_ropes(config) and plain
    return own and not why_not_exact(config)


def reads_images(config: Any) -> bool:
    """Tell whether a model reads images beside text. Its config has one for each."""
    return config.model_type in IMAGE_ARCHITECTURES


def image_reason(config: Any) -> str:
    """Say why a model that reads images is not exact; "" for others."""
    return f"architecture {config.model_type}: it reads images" * reads_images(config)


def inner_size(config: Any) -> int:
    """Return the width of a dense MLP, of the widest where layers differ, by its name in one
    transformers config or another."""
    names = ("intermediate_size", "ffn_dim", "n_inner")
    sizes = next(filter(None, (values_of(config, name) for name in names)), [])
    return max(sizes, default=4 * int(config.hidden_size))


def heads_of(config: Any) -> int:
    """Return how many attention heads there are; 0 in Mamba."""
    return max(values_of(config, "num_attention_heads"), default=0)


def kv_heads_of(config: Any) -> int:
    """Return how many key/value heads there are, at most, where layers have different numbers; a
    config without them has no groups."""
    return max(values_of(config, "num_key_value_heads"), default=0) or heads_of(config)


def values_of(config: Any, name: str) -> list[int]:
    """List the values that a field has in the layers, without zeros and None."""
    layers = [config]
    if config.is_heterogeneous:  # as in Gemma 4
        layers = [config.per_layer_config[number] for number in range(config.num_hidden_layers)]
    values = [getattr(layer, name, None) for layer in layers]
    each = [value if isinstance(value, list) else [value] for value in values]  # Gemma 3n's MLP
    return sorted({value for own in each for value in own if value})


def head_size(config: Any) -> int:
    """Return the width of an attention head, of the widest where layers differ; some transformers
    configs leave it out, that of latent attention (DeepSeek) has two parts, and linear biases
    (Bloom) are beside it."""
    if getattr(config, "qk_nope_head_dim", None):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    sizes = values_of(config, "head_dim")
    own = max(sizes, default=0) or config.hidden_size // max(1, heads_of(config))
    return int(own) + BIAS_SIZE.get(config.model_type, 0)


def window_of(config: Any, layer: int) -> int | None:
    """Return the sliding window of a layer; None if it sees every token before."""
    types = getattr(config, "layer_types", None)
    full = types is not None and types[layer] != "sliding_attention"
    return None if full else getattr(config, "sliding_window", None)


def is_sparse(config: Any, layer: int) -> bool:
    """Tell whether a layer is a mixture of experts."""
    if config.model_type != "qwen3_moe" or layer in config.mlp_only_layers:
        return False
    return bool(config.num_experts and (layer + 1) % config.decoder_sparse_step == 0)


def has_experts(config: Any) -> bool:
    """Tell whether any layer is a mixture of experts."""
    return any(is_sparse(config, layer) for layer in range(config.num_hidden_layers))


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 < value <= most


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _no_model(path: str, key: str) -> UserError:
    """Say what lies at path instead of a model directory, and name the command that leads to
    one."""
    folder = Path(path)
    next_command = "tandem tiny DIR makes a tiny model; or give a hub name such as Qwen/Qwen3-0.6B"
    if folder.is_file():
        found, next_command = "a file", f"{key}={folder.parent}, if the model's files are beside it"
    elif str(folder).startswith("~"):
        found, next_command = "a path that no shell has expanded", f"{key}={folder.expanduser()}"
    elif not folder.is_dir():
        found = "no such directory"
    elif (folder / "config.toml").is_file():
        newest = max(folder.glob("hf/step_*"), default=None)
        found, next_command = (
            "a run folder",
            f"{key}={newest}" if newest else f"tandem export {folder}",
        )
    elif (folder / "state.json").is_file():
        found, next_command = (
            "a checkpoint of a run",
            f"tandem export {folder.parent.parent} --step {folder.name[5:].lstrip('0')}",
        )
    else:
        names = sorted(file.name for file in folder.iterdir())[:5]
        found = f"a directory without config.json: {', '.join(names) or 'empty'}"
    return UserError(
        "the model directory does not exist"
        if found == "no such directory"
        else "this is not a model directory",
        where=f"{key} = {path}",
        found=found,
        expected="a Hugging Face model directory (config.json, model.safetensors, tokenizer.json)",
        next=next_command,
    )


def _not_exact(where: str, reasons: list[str]) -> UserError:
    return UserError(
        "this model cannot run",
        where=where,
        found="; ".join(reasons),
        expected="a causal language model of transformers with float weights",
    )


def _unreadable(
    path: str, name: str, where: str, found: str, what: str = "model's config"
) -> UserError:
    expected = "a file as transformers writes it"
    if Path(path).is_dir():
        cure = f"mend {Path(path, name)}, or copy it again from where the model is from"
    else:
        expected += ", or a hub name that can be reached from here"
        cure = "name a model directory; or fetch it where there is a network and set "
        cure += "HF_HUB_OFFLINE=1 here"
    return UserError(
        f"the {what} cannot be read",
        where=f"{where}, {name}",
        found=found,
        expected=expected,
        next=cure,
    )
