"""Checkpoints whose weights are quantized already: told at once, with what can be named instead.

Adapters are merged into float weights, which are trained, hashed and exported; quantizers of others
need a library each, most of them a GPU, and none gives a trainer and an engine the same bits.
"""

from collections.abc import Mapping
from typing import Any

from tandem.runtime.errors import UserError

KEYS = ("quantization_config", "compression_config")
# what undoes a quantizer, where that is one call
UNDONE = {"bitsandbytes": "M.from_pretrained(DIR).dequantize().save_pretrained(NEW)"}


def require_float(values: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a config.json of quantized weights."""
    for key in KEYS:
        if (quantizer := values.get(key)) is not None:
            raise _quantized(where, key, quantizer)


def _quantized(where: str, key: str, quantizer: Any) -> UserError:
    about = quantizer if isinstance(quantizer, dict) else {}
    method = str(about.get("quant_method", "unknown"))[:40]
    undo = f"; or make it float: {UNDONE[method]}" if method in UNDONE else ""
    return UserError(
        "the model's weights are quantized",
        where=where,
        found=f"{key} of {method}",
        expected="float weights in safetensors",
        next="name the model that it was quantized from, and quantize it here with lora.rank=16 "
        f"lora.base=nf4{undo}",
    )
