"""A model directory's config.json, read as data; a model of a kind that cannot run is refused.

transformers takes some keys of that file as instructions: Python files to import (auto_map),
attention kernels to fetch, quantizers, other weight files. So the file is read here without them,
and its model type must be a causal language model of the installed transformers. Of quantized
weights two kinds run, which transformers dequantizes while it loads them: other quantizers need a
library each, most of them a GPU, and multiply in a trainer otherwise than in an engine. This file
knows no weights.
"""

import json
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tandem.model import custom_code
from tandem.model.paths import reads_more_than_text
from tandem.runtime.errors import UserError

logger = logging.getLogger(__name__)

HeadKind = Literal["tokens", "value"]
# Those that run through Tandem's own layer (layers.py); all others through general.py.
LEAN_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
# keys that tell transformers what to fetch or how to run, in a model's config or that of a part
INSTRUCTIONS = re.compile(
    "auto_map|transformers_weights|.*_implementation(_internal)?"
    "|(fusion|distributed|quantization|compression)_config"
)
CONFIG, SCORES = "config.json", "ForSequenceClassification"
BIAS_SIZE = {"bloom": 8}  # numbers beside those of a head, for linear biases (general_parts.py)
DEQUANTIZED = ("fp8", "mxfp4")  # DeepSeek-V3's and Qwen3's, and gpt-oss'
CONVOLVED = ("lfm2", "lfm2_moe", "lfm3")


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
    folder, where = Path(path), f"{key} = {path}"
    is_local = path.startswith((".", "/", "~")) or path.count("/") != 1 or folder.parent.is_dir()
    if (is_local or folder.exists()) and not (folder / CONFIG).is_file():
        raise _no_model(folder, key, where)
    if not folder.is_dir():
        _tell(f"no directory {path} here: looking for it on the Hugging Face hub")
    config = _read_config(path, where)
    if head == "tokens" and (config.architectures or [""])[0].endswith(SCORES):
        raise UserError(
            "this is a reward model, which has no tokens to say",
            where=where,
            found=config.architectures[0],
            expected="a causal language model",
            next="a reward model can be the critic: critic.path",
        )
    return config


def _read_config(path: str, where: str) -> Any:
    """Make the transformers config of a causal language model from the declared fields."""
    values = read_json(path, CONFIG, where) or {}
    kind, text = values.get("model_type"), values.get("text_config")
    parts = [part for part in (values, text) if isinstance(part, dict)]
    known = kind in LEAN_ARCHITECTURES or reads_more_than_text(kind) or is_language_model(kind)
    own = custom_code.brings_model(values) and (custom_code.is_allowed() or not known)
    if own:
        custom_code.require_allowed(path, values, f"{where}, {CONFIG}")
    elif not (known or parts[1:]):
        raise _cannot_run(where, f"architecture {kind!s:.60}")
    quantizers = [part["quantization_config"] for part in parts if part.get("quantization_config")]
    for quantizer in quantizers:
        method = quantizer.get("quant_method") if isinstance(quantizer, dict) else quantizer
        if method not in DEQUANTIZED:
            raise UserError(
                "the model's weights are quantized",
                where=f"{where}, {CONFIG}",
                found=f"quantization_config of {method!s:.40}",
                expected=f"float weights; or {' or '.join(DEQUANTIZED)}, read as float",
                next="name the model that it was quantized from, and quantize it here with "
                "lora.rank=16 lora.base=nf4",
            )
    try:
        config = custom_code.custom_config(path) if own else _plain_config(kind, values)
        found = config if own or reads_more_than_text(kind) else text_part(config, where)
        whole_text = found.get_text_config()
    except Exception as error:  # transformers raises wherever it first uses a wrong value
        raise _unreadable(path, CONFIG, where, first_line(error)) from None
    if found is not config and quantizers:
        raise _cannot_run(where, "quantized weights of a model that also reads images")
    if not reads_more_than_text(kind) and whole_text is not found:
        what = "whose language model transformers cannot run by itself"
        raise _cannot_run(where, f"architecture {kind}, {what}")
    return found


def _plain_config(model_type: Any, values: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    def plain(part: dict[str, Any]) -> dict[str, Any]:
        return {
            name: plain(value) if isinstance(value, dict) else value
            for name, value in part.items()
            if not INSTRUCTIONS.fullmatch(name)
        }

    return CONFIG_MAPPING[model_type].from_dict(plain(values))


def is_language_model(model_type: Any) -> bool:
    """Tell whether transformers has a causal language model of this type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return isinstance(model_type, str) and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def text_part(config: Any, where: str) -> Any:
    """Return the config of the language model in a transformers config of several parts, as a model
    of its own: parts for images or sound are neither loaded nor trained, and not exported. Return
    the config itself if transformers has no causal language model of that kind.

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
    _tell(
        f"{where} ({config.model_type}) also reads images or sound: its language model "
        f"({text.model_type}) runs without those parts, and is exported without them"
    )
    return text


@cache
def _tell(note: str) -> None:
    logger.warning(note)


def is_text_part(path: str, config: Any) -> bool:
    """Tell whether check_model's config is of a part of the model at path, its language model."""
    values = read_json(path, CONFIG) or {}
    whole: bool = values.get("model_type", config.model_type) == config.model_type
    return not (custom_code.is_custom(config) or whole)


def read_json(path: str, name: str, where: str = "") -> dict[str, Any] | None:
    """Read the JSON object in a file of a model directory or hub name; None without such a file.

    Raises UserError for a file that cannot be read; where: of the model, in the message, by default
    its path.
    """
    try:
        file = find_file(path, name)
        if file is None:
            return None
        values = json.loads(file.read_bytes(), object_hook=special_float)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not JSON, or not UTF-8
        raise _unreadable(path, name, where, first_line(error)) from None
    if not isinstance(values, dict):
        raise _unreadable(path, name, where, "no JSON object")
    return values


def special_float(values: dict[str, Any]) -> Any:
    """Read an object that transformers writes for infinity, which JSON has no number for."""
    return float(str(values["__float__"])) if values.keys() == {"__float__"} else values


def find_file(path: str, name: str) -> Path | None:
    """Find a file of a local directory, or of a hub name, fetched to the local cache; a hub name
    without config.json is none. Raises OSError."""
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.is_file() else None
    from transformers.utils import cached_file

    found = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=name == CONFIG,
        _raise_exceptions_for_connection_errors=name == CONFIG,
        local_files_only=not hub_answers(),
    )
    return None if found is None else Path(found)


@cache
def hub_answers() -> bool:
    """Tell whether the hub answers one try: its client makes six, and only then uses its cache."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:  # of the hub's HTTP client, another one by version; or it is to be offline
        return False
    return True


def first_line(error: Exception) -> str:
    """Describe an error in one line, e.g. "KeyError: 'vocab'"."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:500]


def _no_model(folder: Path, key: str, where: str) -> UserError:
    """Say what lies there instead of a model directory."""
    found = "a directory without config.json" if folder.exists() else "no such directory"
    cure = "tandem tiny DIR makes a tiny model; or give a hub name such as Qwen/Qwen3-0.6B"
    if (folder / "config.toml").is_file():
        newest = max(folder.glob("hf/step_*"), default=None)
        found, cure = "a run folder", f"{key}={newest}" if newest else f"tandem export {folder}"
    return UserError(
        "this is not a model directory"
        if folder.exists()
        else "the model directory does not exist",
        where=where,
        found=found,
        expected="a Hugging Face model directory (config.json, model.safetensors, tokenizer.json)",
        next=cure,
    )


def _cannot_run(where: str, found: str) -> UserError:
    return UserError(
        "this model cannot run",
        where=where,
        found=found,
        expected="a causal language model of transformers with float weights",
    )


def _unreadable(path: str, name: str, where: str, found: str) -> UserError:
    from huggingface_hub.constants import HF_HUB_OFFLINE as offline

    cure = "fetch it where there is a network and set HF_HUB_OFFLINE=1 here"
    cure = f"name a directory, or {'unset HF_HUB_OFFLINE, which is set' if offline else cure}"
    if is_local := Path(path).is_dir():
        cure = f"mend {Path(path, name)}, or copy it again from where the model is from"
    return UserError(
        f"the model's {name} cannot be read",
        where=f"{where or path}, {name}",
        found=found if is_local else f"no such directory here, and of the hub: {found}",
        expected="a file as transformers writes it",
        next=cure,
    )


def logit_softcap(config: Any) -> float:
    """Return the soft cap of a model's logits, 0 without one."""
    names = ("final_logit_softcapping", "output_logit_soft_cap")  # Gemma, xLSTM
    return next((cap for name in names if (cap := getattr(config, name, None))), 0.0)


def why_not_exact(config: Any) -> str:
    """Say why no exact path can run this transformers config; "" if one may.

    Of a model that is not lean, its trial decides (trial.py)."""
    if not heads_of(config):
        return "no attention heads"
    if (size := head_size(config)) < 8:
        return f"head size {size} (at least 8: smaller matmuls take another kernel)"
    return ""


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


def conv_layers(config: Any) -> list[int]:
    """List the numbers of the layers that are short convolutions, by a transformers config."""
    types = getattr(config, "layer_types", None) or [] if config.model_type in CONVOLVED else []
    return [number for number, kind in enumerate(types) if kind == "conv"]


def is_sparse(config: Any, layer: int) -> bool:
    """Tell whether a layer is a mixture of experts."""
    if config.model_type != "qwen3_moe" or layer in config.mlp_only_layers:
        return False
    return bool(config.num_experts and (layer + 1) % config.decoder_sparse_step == 0)


def has_experts(config: Any) -> bool:
    """Tell whether any layer is a mixture of experts."""
    if config.model_type != "qwen3_moe":
        return False
    return any(is_sparse(config, layer) for layer in range(config.num_hidden_layers))
