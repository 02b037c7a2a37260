"""Models that this adapter does not give to Megatron, refused before their weights are loaded."""

from typing import Any

from tandem.config.parallel import Parallel
from tandem.model.config_file import HeadKind
from tandem.runtime.errors import UserError


def check_megatron(shape: Any, parallel: Parallel, head: HeadKind = "tokens") -> None:
    """Raise UserError for a model of this transformers config that Megatron does not train."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = shape.rope_parameters["rope_type"]
    reasons = [
        (head == "value", "a value or reward model"),
        (getattr(shape, "attention_bias", False), "a bias in attention_bias"),
        (
            shape.model_type == "qwen3_moe" and parallel.tensor > 1,
            "experts with parallel.tensor > 1 (without sequence parallelism Megatron refuses)",
        ),
        (
            shape.num_hidden_layers % parallel.pipeline > 0,
            f"{shape.num_hidden_layers} layers in {parallel.pipeline} equal stages",
        ),
        (
            (kind != "default" and float(ROPE_INIT_FUNCTIONS[kind](shape, "cpu")[1]) != 1.0),
            "a rotary embedding that scales attention (yarn)",
        ),
    ]
    if found := [reason for wrong, reason in reasons if wrong]:
        raise UserError(
            "Megatron does not train this model",
            where="train.backend = megatron",
            found="; ".join(found),
            expected="Llama, Mistral, Qwen2, Qwen3 or Qwen3-MoE with all weights trained",
            next="train.backend=tandem",
        )
