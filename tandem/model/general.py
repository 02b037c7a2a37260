"""The general exact path: transformers' own forward pass of any causal language model, made exact.

Replacements make it so: linears (linear.py), attention (through transformers' AttentionInterface,
over the plans of attention.py and paged_attention.py), activations (activations.py), layer norms,
linear biases and short convolutions (general_parts.py). Positions, rotary embeddings, windows and
scales stay transformers' own. A pass is a batch of one: its rows are those of all sequences, with
their position ids. Whether a model is exact so, and computes what transformers computes, its trial
decides (trial.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tandem.model.activations import KINDS, ExactActivation, soft_cap
from tandem.model.attention import Plan, Scoring
from tandem.model.config_file import BIAS_SIZE, logit_softcap
from tandem.model.expert_choices import ExpertChoices
from tandem.model.general_experts import ExactFunctions, make_experts_exact
from tandem.model.general_parts import (
    BIASED,
    CONVOLUTIONS,
    NORMS,
    ExactBloomAttention,
    ExactLayerNorm,
    ExactShortConv,
)
from tandem.model.linear import ExactConv1D, ExactLinear, PackedWeight, is_conv1d, replace_parts
from tandem.model.load import ExactModel, run_twice
from tandem.model.lora import Lora, exact_adapted, quantize_base
from tandem.model.onednn import padded_rows

ATTENTION = "tandem_exact"  # its name in transformers' AttentionInterface
HARMLESS = ("position_ids",)  # which are the plan's too


class Pass(NamedTuple):
    """Plan, heads (as ExactModel.heads) and positions, int64 [T], of a pass."""

    plan: Plan
    heads: tuple[int, int, int]
    positions: Tensor


_pass: ContextVar[Pass] = ContextVar("the pass that runs")


class GeneralModel(ExactModel):
    """transformers' causal language model with exact parts in place of its own.

    A factor of the logits is applied to the last hidden states, before the output projection.
    """

    path = "general"
    window = None  # transformers' layers know their own

    def __init__(self, module: Any, lora: Lora | None, functions: ExactFunctions | None):
        super().__init__(module, lora)
        self._functions = functions  # of a mixture of experts
        scale: float = getattr(self.config, "logit_scale", None) or 1.0  # Cohere
        self.factor = scale / (getattr(self.config, "logits_scaling", None) or 1.0)  # Granite
        self.softcap = logit_softcap(self.config)
        for layer in module.modules():
            if isinstance(layer, GradientCheckpointingLayer):  # of the decoder
                layer.forward = partial(self._run_layer, layer.forward)

    def hidden(
        self, tokens: Tensor, positions: Tensor, plan: Plan, choices: ExpertChoices | None = None
    ) -> Tensor:
        """Compute the last hidden states [T, D] of tokens and positions, int64 [T]."""
        assert choices is None, "refused by jobs/models.py"
        rows = len(tokens)
        padding = (0, padded_rows(rows, self.dtype) - rows)
        tokens, positions = (F.pad(each, padding) for each in (tokens, positions))
        with _attending(Pass(plan, self.heads, positions)), self._functions or nullcontext():
            out = self.module.base_model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False
            )
        states: Tensor = out.last_hidden_state[0, :rows]
        return states if self.factor == 1.0 else states * self.factor

    def named_weights(self) -> dict[str, Tensor]:
        """Return the parameters, and a checkpoint's buffers, as biases of DeepSeek's routers."""
        buffers = dict(self.module.named_buffers())
        kept = {name: buffers[name] for name in self.module.state_dict() if name in buffers}
        return super().named_weights() | kept

    def packs(self) -> list[PackedWeight]:
        return [*super().packs(), *(self._functions.packs.values() if self._functions else ())]

    def split(self, count: int) -> None:
        """Take a single process only: trainer/parallel/checks.py refuses others before."""
        assert count == 1

    def _run_layer(self, forward: Callable[..., Any], x: Tensor, *args: Any, **others: Any) -> Any:
        if not (self.checkpointing and torch.is_grad_enabled()):
            return forward(x, *args, **others)
        # a backward pass runs outside of its forward pass's context and `adapter_off`
        own, base_only = _pass.get(), self._base_only
        return run_twice(partial(self._repeating, own, base_only), forward, x, *args, **others)

    @contextmanager
    def _repeating(self, own: Pass, base_only: bool) -> Iterator[None]:
        with _attending(own), self._running(base_only), self._functions or nullcontext():
            yield


class CappedHead(ExactLinear):
    """An output projection whose logits have a soft cap, in place of one without."""

    def __init__(self, head: ExactLinear, softcap: float):
        super().__init__(head.weight, head.bias)
        self.softcap = softcap

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled(), "logprobs.token_logprobs has the gradient"
        return soft_cap(super().forward(x).float(), self.softcap)


def make_general(module: Any, lora: Lora | None = None) -> GeneralModel:
    """Put the exact parts into a transformers module in place, attention among them."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)
    functions = put_exact_parts(module, lora)
    replace_parts(module, _planned_part)
    if module.config.model_type in BIAS_SIZE:
        module.config._attn_implementation = ATTENTION  # so that no mask is made
    else:
        module.set_attn_implementation(ATTENTION)
    return GeneralModel(module.eval(), lora, functions)


def put_exact_parts(module: Any, lora: Lora | None) -> ExactFunctions | None:
    """Put all exact parts but attention into a transformers module in place; return the functions
    of its experts, if it has any."""
    if module.base_model is module:  # Llama 4's prefix is that of its place among other parts
        module.base_model_prefix = "model"
    replace_parts(module, _exact_part)
    functions = make_experts_exact(module)
    head, softcap = module.get_output_embeddings(), logit_softcap(module.config)
    if head is not None and softcap:
        module.set_output_embeddings(CappedHead(head, softcap))
    quantize_base(module, lora)
    return functions


def _exact_part(child: Any) -> nn.Module:
    name = type(child).__name__
    if name == "Linear":  # PEFT's lora Linear has the same name
        is_plain = isinstance(child, nn.Linear)
        return ExactLinear(child.weight, child.bias) if is_plain else exact_adapted(child)
    if is_conv1d(child):
        return ExactConv1D(child.weight, child.bias)
    if name in NORMS and child.weight is not None:
        return ExactLayerNorm(child)
    return ExactActivation(KINDS[name]) if name in KINDS else child


def _planned_part(child: Any) -> nn.Module:
    """Replace a part that looks into the pass, of which transformers knows nothing."""
    name = type(child).__name__
    if name in CONVOLUTIONS:
        return ExactShortConv(child, lambda: _pass.get().plan)
    if name == BIASED:
        return ExactBloomAttention(child, _attend, lambda: _pass.get().positions)
    return child  # type: ignore[no-any-return]


@contextmanager
def _attending(own: Pass) -> Iterator[None]:
    token = _pass.set(own)
    try:
        yield
    finally:
        _pass.reset(token)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend by the plan of the pass: query [1, H, T, E], key and value [1, K, T, E] to
    [1, T, H, E]. transformers calls it, with its own names."""
    window, softcap, sinks = (others.pop(n, None) for n in ("sliding_window", "softcap", "s_aux"))
    # keys that a model chooses itself, as it may do in long sequences only
    found = ["attention_mask"] if attention_mask is not None else []
    found += [n for n, v in others.items() if isinstance(v, Tensor) and n not in HARMLESS]
    if found:
        raise NotImplementedError(f"attention by {', '.join(found)}")
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    plan, (_, kv_heads, size), _ = _pass.get()
    width = v.shape[-1]
    # pages have one width and number of heads: zeros add nothing, and a head may be there twice
    q, k, v = (F.pad(t, (0, size - t.shape[-1])) if t.shape[-1] < size else t for t in (q, k, v))
    if k.shape[1] < kv_heads:
        k, v = (t.repeat_interleave(kv_heads // t.shape[1], 1) for t in (k, v))
    out = plan.attend(module.layer_idx, q, k, v, Scoring(scale, window, softcap or 0.0, sinks))
    return out[None, ..., :width], None
