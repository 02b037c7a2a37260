"""Load a Hugging Face causal language model, made exact: transformers' parts, in Tandem's layer, linear and attention.

The module stays transformers' own, parameter names included, so a checkpoint is a plain Hugging Face directory.
What cannot be exact is refused by name, before any work.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.errors import UserError
from tandem.model.attention import PackedPlan, Plan
from tandem.model.experts import ExactExperts, ExactRouter
from tandem.model.kernels import triton_for
from tandem.model.layers import ExactLayer, norm, rotation_of
from tandem.model.linear import ExactLinear, padded_rows
from tandem.model.paged import PagedPlan, Runs

EXACT_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class ExactModel(nn.Module):
    """A causal language model whose logits of a token depend on that token's own prefix and the weights only.

    `hidden` and `head` are the two halves that engine and trainer share.
    """

    def __init__(self, module: Any):
        super().__init__()
        self.module = module
        self.config = module.config
        self.head: ExactLinear = module.get_output_embeddings()
        self._weights = list(module.parameters())

    def hidden(self, tokens: Tensor, positions: Tensor, plan: Plan) -> Tensor:
        """tokens and positions int64 [T] -> last hidden states [T, D].

        Rows are padded once here, so that no linear has to; a plan leaves rows that it does not know at zero.
        """
        rows, inner = len(tokens), self.module.model
        padding = (0, padded_rows(rows) - rows)
        x = inner.embed_tokens(F.pad(tokens, padding).to(self.device))
        rotation = rotation_of(inner.rotary_emb, x, F.pad(positions, padding).to(self.device))
        for layer in inner.layers:
            x = layer(x, rotation, plan)
        return norm(inner.norm, x)[:rows]

    def packed_plan(self, segments: np.ndarray) -> Plan:
        """Attention of packed segments, int64 [S, 4] as in types.Microbatch, where the weights are."""
        if triton := triton_for(self.head.weight):
            return triton.TritonPackedPlan(segments)  # type: ignore[no-any-return]
        heads, kv_heads, _ = self.heads
        return PackedPlan(segments, group=heads // kv_heads, kv_heads=kv_heads)

    def paged_plan(self, keys: Sequence[Tensor], values: Sequence[Tensor], runs: Runs) -> Plan:
        """Attention of new tokens over a paged cache; see paged.PagedPlan."""
        if triton := triton_for(self.head.weight):
            return triton.TritonPagedPlan(keys, values, runs)  # type: ignore[no-any-return]
        return PagedPlan(keys, values, runs, self.heads[0])

    @property
    def heads(self) -> tuple[int, int, int]:
        """(query heads, key/value heads, head size)"""
        return self.config.num_attention_heads, self.config.num_key_value_heads, head_size(self.config)

    def named_weights(self) -> dict[str, Tensor]:
        """Every parameter once, under its Hugging Face name (a tied head is its embedding)."""
        return {name: p.detach() for name, p in self.module.named_parameters()}

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def changes(self) -> int:
        """A number that grows with every change of a weight in place: what was computed at another one is stale."""
        return sum(weight._version for weight in self._weights)

    @torch.no_grad()
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """In place, so that an engine's and an optimizer's tensors are still the same ones."""
        for name, parameter in self.module.named_parameters():
            parameter.copy_(weights[name])


def load_model(path: str) -> ExactModel:
    """A directory or hub name -> the exact model in float32. Raises UserError when it is missing or not exact."""
    check_model(path)
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        module, report = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError("the model cannot be loaded", where=path, found=str(error).splitlines()[0],
                        expected="weights in safetensors beside config.json") from None  # fmt: skip
    if missing := sorted(report["missing_keys"]):  # transformers would fill them with random numbers
        raise UserError("the model cannot be loaded", where=path, expected="a tensor for every parameter of config.json",
                        found=f"no weights for {len(missing)} parameters: {', '.join(missing[:3])}")  # fmt: skip
    return make_exact(module)


def check_model(path: str) -> None:
    """Refuse, without loading weights, what is not there or cannot be exact."""
    from transformers import AutoConfig

    if not path:
        raise UserError("no model is named", where="model.path", expected="a Hugging Face directory or hub name",
                        next="tandem train RECIPE model.path=DIR")  # fmt: skip
    folder = Path(path)
    looks_local = folder.exists() or path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local and not (folder / "config.json").is_file():
        found = "no such directory" if not folder.is_dir() else f"a directory without config.json: {_names(folder)}"
        raise UserError("the model directory does not exist", where=f"model.path = {path}", found=found,
                        expected="a Hugging Face model directory (config.json, model.safetensors, tokenizer.json)",
                        next="`make demo` makes one; or give a hub name such as Qwen/Qwen3-0.6B")  # fmt: skip
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise UserError("the model's config cannot be read", where=f"model.path = {path}", found=str(error).splitlines()[0],
                        expected="a Hugging Face config.json, or a hub name that can be reached from here") from None  # fmt: skip
    reasons = why_not_exact(config)
    if reasons:
        raise UserError("this model cannot run exactly", where=f"model.path = {path}", found="; ".join(reasons),
                        expected=f"one of {', '.join(EXACT_ARCHITECTURES)} with SiLU and a static rotary embedding")  # fmt: skip


def _names(folder: Path) -> str:
    return ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "empty"


def why_not_exact(config: Any) -> list[str]:
    """Every reason why the exact engine cannot run this transformers config; empty when it can."""
    if config.model_type not in EXACT_ARCHITECTURES:
        return [f"architecture {config.model_type}"]
    reasons = []
    if config.hidden_act != "silu":
        reasons.append(f"activation {config.hidden_act}")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE:
        reasons.append(f"rotary embedding {rope}, which depends on the length of the batch")
    if head_size(config) < 8:
        reasons.append(f"head size {head_size(config)} (at least 8: smaller matmuls take another kernel)")
    return reasons


def head_size(config: Any) -> int:
    """Width of an attention head; some transformers configs leave it out (getattr: the config is not ours)."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def make_exact(module: Any) -> ExactModel:
    """Put the exact parts into a transformers module, in place."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            setattr(parent, name, _exact(child))
    config, layers = module.config, module.model.layers
    for number, layer in enumerate(layers):
        layers[number] = ExactLayer(layer, number, window_of(config, number))
    return ExactModel(module.eval())


def window_of(config: Any, layer: int) -> int | None:
    """The sliding window of a layer, None where it sees everything (the config is transformers' own, hence getattr)."""
    types = getattr(config, "layer_types", None)
    full = types is not None and types[layer] != "sliding_attention"
    return None if full else getattr(config, "sliding_window", None)


def _exact(child: Any) -> nn.Module:
    match type(child).__name__:
        case "Linear":
            return ExactLinear(child.weight, child.bias)
        case "Qwen3MoeTopKRouter":
            return ExactRouter(child)
        case "Qwen3MoeExperts":
            return ExactExperts(child)
        case _:
            return child  # type: ignore[no-any-return]
