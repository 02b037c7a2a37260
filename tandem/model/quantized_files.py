"""Checkpoints whose weights are quantized already.

Two kinds transformers dequantizes by itself while it loads them, which is all that a run sees. Any
other is refused: their quantizers need a library each, most of them a GPU, and what they multiply
is not the same in a trainer and an engine.
"""

from collections.abc import Mapping
from typing import Any

from tandem.runtime.errors import UserError

KEYS = ("quantization_config", "compression_config")
DEQUANTIZED = ("fp8", "mxfp4")  # DeepSeek-V3's and Qwen3's, and gpt-oss'


def require_float(values: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a config.json of weights that stay quantized."""
    for key in KEYS:
        if (quantizer := values.get(key)) is not None:
            about = quantizer if isinstance(quantizer, dict) else {}
            method = str(about.get("quant_method", "unknown"))[:40]
            if method not in DEQUANTIZED or key != KEYS[0]:
                raise _quantized(where, f"{key} of {method}")


def _quantized(where: str, found: str) -> UserError:
    return UserError(
        "the model's weights are quantized",
        where=where,
        found=found,
        expected=f"float weights in safetensors; or {' or '.join(DEQUANTIZED)}, which become float",
        next="name the model that it was quantized from, and quantize it here with lora.rank=16 "
        "lora.base=nf4",
    )
