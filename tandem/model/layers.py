"""The exact decoder layer: transformers' modules run on rows [T, D] without a batch dimension.

Trainer and engine both run it, so their bits cannot drift apart: they differ only in the plan that
attends. Query, key and value projections run as one linear, and so do gate and up, because at few
rows the time of a linear is mostly its start. Sub-modules keep their names, for checkpoints
and adapters.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.model.attention import Plan, Scoring
from tandem.model.expert_choices import ExpertChoices
from tandem.model.kernels import Rotation, kernels_of
from tandem.model.linear import FusedLinear, PackedWeight, PackOwner


class ExactLayer(PackOwner):
    """A pre-norm decoder layer (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE).

    It is made of the children of a transformers layer.
    """

    def __init__(self, layer: Any, number: int, window: int | None):
        super().__init__()
        # in the order of the original, as the parameters are
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.number, self.window = number, window
        attention = self.self_attn
        self.qkv = FusedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.sparse = type(self.mlp).__name__ == "Qwen3MoeSparseMoeBlock"
        self.gate_up = None if self.sparse else FusedLinear(self.mlp.gate_proj, self.mlp.up_proj)
        self.kv_heads = attention.k_proj.weight.shape[0] // attention.head_dim
        self.normed = type(attention).__name__ in ("Qwen3Attention", "Qwen3MoeAttention")

    def packs(self) -> list[PackedWeight]:
        """Return the packs of linears that run as one."""
        fused = [self.qkv] if self.gate_up is None else [self.qkv, self.gate_up]
        return [pack for linears in fused for pack in linears.packs()]

    def split(self, count: int) -> None:
        """Sum the outputs of attention and MLP from `count` parts, as ExactLinear.split does."""
        self.self_attn.o_proj.split(count)
        if self.sparse:
            self.mlp.experts.splits = count
        else:
            self.mlp.down_proj.split(count)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        plan: Plan,
        choices: ExpertChoices | None = None,
        again: bool = True,
    ) -> Tensor:
        """Map x [T, D] to [T, D]. choices: record or replace those of its router, if it has one;
        again: whether the backward pass computes norms and SwiGLU again, or keeps them."""
        again = again and torch.is_grad_enabled()
        normed = norm(self.input_layernorm, x)
        with made_again(normed, partial(norm, self.input_layernorm, x), again):
            heads = self.qkv(normed)
        x, normed = add_norm(self.post_attention_layernorm, x, self._attend(heads, rotation, plan))
        if self.gate_up is None:
            choose = None if choices is None else partial(choices.choose, self.number)
            _, scores, chosen = self.mlp.gate(normed, choose)
            return x + self.mlp.experts(normed, chosen, scores)  # type: ignore[no-any-return]
        with made_again(normed, partial(norm, self.post_attention_layernorm, x), again):
            both = self.gate_up(normed)
        swiglu = kernels_of(both).swiglu
        inner = swiglu(both)
        with made_again(inner, partial(swiglu, both), again):
            return x + self.mlp.down_proj(inner)

    def _attend(self, x: Tensor, rotation: Rotation, plan: Plan) -> Tensor:
        """Map queries, keys and values side by side, [T, (H + 2K) * E], to [T, D]."""
        attention, kv_heads = self.self_attn, self.kv_heads
        heads = x.view(len(x), -1, attention.head_dim)
        each = heads.shape[1] - 2 * kv_heads, kv_heads
        rotate = kernels_of(x).rotate
        if self.normed:
            q, k, v = heads.split((*each, kv_heads), 1)
            q = rotate(norm(attention.q_norm, q), rotation)
            k = rotate(norm(attention.k_norm, k), rotation)
        else:
            both, v = heads.split((sum(each), kv_heads), 1)
            q, k = rotate(both, rotation).split(each, 1)
            if torch.is_grad_enabled():  # a view would keep the queries before their rotation too
                v = v.contiguous()
        out = plan.attend(self.number, q, k, v, Scoring(attention.scaling, self.window))
        return attention.o_proj(out.reshape(len(x), -1))


def made_again(
    made: Tensor, make: Callable[[], Tensor], again: bool
) -> AbstractContextManager[object]:
    """Have the backward pass of what is computed here call `make` for a tensor's bits, instead of
    keeping it; unless `again`, do nothing."""

    if not again:
        return nullcontext()

    def identity(t: Tensor) -> tuple[object, ...]:
        return t.data_ptr(), t.shape, t.stride(), t.dtype

    same = identity(made)

    def pack(kept: Tensor) -> Tensor | Callable[[], Tensor]:
        return make if identity(kept) == same else kept

    return torch.autograd.graph.saved_tensors_hooks(
        pack, lambda kept: kept if isinstance(kept, Tensor) else kept()
    )


def embed(weight: Tensor, tokens: Tensor) -> Tensor:
    """Look up tokens int64 [T] in a weight [V, D] of a lower precision than its gradient, which is
    summed in float32."""
    if not torch.is_grad_enabled():
        return F.embedding(tokens, weight)
    return _Embed.apply(weight, tokens)  # type: ignore[no-any-return]


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = len(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (tokens,), above = ctx.saved_tensors, grads[0].float()
        return torch.ops.aten.embedding_dense_backward(above, tokens, ctx.rows, -1, False), None


def norm(module: Any, x: Tensor) -> Tensor:
    """Compute transformers' RMSNorm of x [..., D], in float32."""
    return kernels_of(x).rms_norm(x, module.weight, module.variance_epsilon)


def add_norm(module: Any, x: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """Compute x + change [T, D] and transformers' RMSNorm of it."""
    return kernels_of(x).add_rms_norm(x, change, module.weight, module.variance_epsilon)


def rotation_of(rotary: Any, x: Tensor, positions: Tensor) -> Rotation:
    """Compute cosine and sine of x's dtype for positions int64 [T].

    The first half of the sine is negated for Kernels.rotate.
    """
    cos, sin = (t[0, :, None] for t in rotary(x, positions[None]))
    half = sin.shape[-1] // 2
    return cos, torch.cat((-sin[..., :half], sin[..., half:]), -1)
