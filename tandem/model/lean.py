"""The lean path: Tandem's own layer (layers.py) in place of transformers' of five architectures."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from tandem.model import custom_code
from tandem.model.config_file import LEAN_ARCHITECTURES, is_sparse, why_not_exact, window_of
from tandem.model.experts import ExactExperts, ExactRouter
from tandem.model.kernels import kernels_of
from tandem.model.layers import ExactLayer
from tandem.model.linear import ExactLinear, replace_parts
from tandem.model.load import ExactModel
from tandem.model.lora import Lora, add_adapter, exact_adapted, quantize_base
from tandem.model.paths import ModelPath
from tandem.model.rope import has_static_ropes, kinds_with_rope

EXPERTS = 8  # of a small model
KINDS = {"full_attention", "sliding_attention"}  # of layers


class Lean(ModelPath):
    name = "lean"

    def why_not(self, config: Any, place: Any) -> str:
        if config.model_type not in LEAN_ARCHITECTURES or custom_code.is_custom(config):
            return f"its layers are not those of {', '.join(LEAN_ARCHITECTURES)}"
        if config.hidden_act != "silu" or config.is_heterogeneous:
            return "its layers are not alike, or have another activation than silu"
        if kinds_with_rope(config) or not has_static_ropes(config):
            return "rotary embeddings that depend on the length, or on the kind of layer"
        kinds = getattr(config, "layer_types", None)  # transformers' Mistral does not look at them
        if not set(kinds or KINDS) <= KINDS or (kinds and config.model_type == "mistral"):
            return "layers of other kinds"
        return why_not_exact(config)

    def build(self, module: Any, lora: Lora | None = None) -> ExactModel:
        if lora is not None:
            add_adapter(module, lora)
        replace_parts(module, _exact_module)
        config, layers = module.config, module.model.layers
        for number, layer in enumerate(layers):
            layers[number] = ExactLayer(layer, number, window_of(config, number))
        quantize_base(module, lora)
        return ExactModel(module.eval(), lora)

    def small(self, config: Any, splits: int) -> Any:
        """Make the config of the first layer of each kind: with and without a window, dense and of
        experts, of which there are few."""
        config = copy.deepcopy(config)
        firsts: dict[tuple[int | None, bool], int] = {}
        for number in range(config.num_hidden_layers):
            firsts.setdefault((window_of(config, number), is_sparse(config, number)), number)
        config.num_hidden_layers = len(firsts)
        if getattr(config, "layer_types", None):  # transformers' own, not in every config
            config.layer_types = [config.layer_types[number] for number in firsts.values()]
        if any(sparse for _, sparse in firsts):
            config.mlp_only_layers = [at for at, (_, sparse) in enumerate(firsts) if not sparse]
            config.decoder_sparse_step = 1
            few = max(EXPERTS, config.num_experts_per_tok)
            config.num_experts = min(config.num_experts, few + -few % splits)
        return config

    def linears(self, model: ExactModel) -> list[tuple[Callable[..., Any], Sequence[ExactLinear]]]:
        runs: list[tuple[Any, Sequence[ExactLinear]]] = []
        for layer in model.module.model.layers:
            fused = [one for one in (layer.qkv, layer.gate_up) if one is not None]
            single = [layer.self_attn.o_proj] + ([] if layer.sparse else [layer.mlp.down_proj])
            runs += [(one, one.parts) for one in fused] + [(linear, [linear]) for linear in single]
        return runs

    def rowwise(self, config: Any) -> dict[str, tuple[Callable[..., Any], int]]:
        return {"SwiGLU": (lambda x: kernels_of(x).swiglu(x), 2 * config.intermediate_size)}


def _exact_module(child: Any) -> nn.Module:
    match type(child).__name__:
        case "Linear" if not isinstance(child, nn.Linear):  # PEFT's lora Linear has the same name
            return exact_adapted(child)
        case "Linear":
            return ExactLinear(child.weight, child.bias)
        case "Qwen3MoeTopKRouter":
            return ExactRouter(child)
        case "Qwen3MoeExperts":
            return ExactExperts(child)
        case _:
            return child  # type: ignore[no-any-return]


LEAN = Lean()
