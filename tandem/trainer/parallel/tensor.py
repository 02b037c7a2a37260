"""Tensor parallelism: each layer is computed by several processes that run the same microbatches
(Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053, section 3).

    x [T, D], whole on every process
    enter                       the gradient of x is summed
    q, k, v | gate, up          outputs divided: whole heads, runs of inner features
    attention | SwiGLU          of the own ones
    o_proj | down_proj          inputs divided
    leave                       partial outputs are summed

Of a mixture of experts each process has a run of whole experts, and `leave` sums over experts:
each box of a weight is one piece, and an expert's products stay as large as they are. Embedding,
norms, router and head are whole on every process; so is their work.

Sums are made in rank order, in float32, and rounded once. `ExactModel.split` makes them in one
process with the same bits.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tandem.model.boxes import Box, whole_box
from tandem.model.experts import ExactExperts
from tandem.model.layers import ExactLayer
from tandem.model.linear import ExactLinear, FusedLinear
from tandem.model.load import ExactModel
from tandem.trainer.parallel.mesh import Group


def divide_layers(model: ExactModel, group: Group, boxes: dict[str, Box]) -> list[str]:
    """Divide the layers of a model among a group, in place.

    boxes: the part of each weight that this process has, by name; the parts made here are written
    into it. Returns the names of whole weights of which each process computes a part of the
    gradient only, which is to be summed (`sum_gradients`).
    """
    if group.size == 1:
        return []
    division = _Division(model, group, boxes)
    for layer in model.module.model.layers:
        division.divide(layer)
    model.split(1)
    return division.partial


def sum_gradients(parameters: Sequence[nn.Parameter], group: Group) -> None:
    """Sum the gradients of parameters over a group, in one collective."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        total = group.sum(torch.cat([grad.flatten() for grad in grads]), "gradients of norms")
        for grad, part in zip(grads, total.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view(grad.shape))


class _Division:
    """One model being divided."""

    def __init__(self, model: ExactModel, group: Group, boxes: dict[str, Box]):
        self.group, self.boxes, self.partial = group, boxes, list[str]()
        self.names = {p: name for name, p in model.module.named_parameters()}

    def divide(self, layer: ExactLayer) -> None:
        attention, size = layer.self_attn, self.group.size
        layer.qkv = self._outputs(layer.qkv)
        layer.kv_heads //= size
        self._inputs(attention.o_proj)
        if layer.normed:  # each process has some of the heads that share these
            self.partial += [self.names[n.weight] for n in (attention.q_norm, attention.k_norm)]
        if layer.gate_up is None:
            self._experts(layer.mlp.experts)
        else:
            layer.gate_up = self._outputs(layer.gate_up)
            self._inputs(layer.mlp.down_proj)

    def _outputs(self, fused: FusedLinear) -> FusedLinear:
        for linear in fused.parts:
            self._cut(linear.weight, 0)
            if linear.bias is not None:
                self._cut(linear.bias, 0)
            if linear.lora_A is not None and linear.lora_B is not None:
                self._cut(linear.lora_B.weight, 0)
                self.partial.append(self.names[linear.lora_A.weight])
        return _DividedOutputs(self.group, *fused.parts)

    def _inputs(self, linear: ExactLinear) -> None:
        self._cut(linear.weight, 1)
        if linear.lora_A is not None and linear.lora_B is not None:
            self._cut(linear.lora_A.weight, 1)
            self.partial.append(self.names[linear.lora_B.weight])
        linear.leave = partial(_leave, self.group)

    def _experts(self, experts: ExactExperts) -> None:
        for weight in (experts.gate_up_proj, experts.down_proj):
            self._cut(weight, 0)
        count, group = len(experts.gate_up_proj), self.group
        experts.expert_packs = experts.expert_packs[:count]

        def before(_: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
            x, chosen, scores = inputs
            x, scores = _Enter.apply(group, x, scores)  # type: ignore[no-untyped-call]
            return x, chosen - group.rank * count, scores

        def behind(_: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor) -> Tensor:
            if torch.is_grad_enabled() and not out.requires_grad:
                # no token chose an expert of this process, whose backward pass must still come to
                # the collectives of the others, and in their order: with activations that are
                # computed again, a product that keeps a tensor has that done first
                used = (inputs[0], *(p for p in experts.parameters() if p.requires_grad))
                nothing = ((t * torch.zeros_like(t)).sum() for t in used)
                out = out + sum(nothing, torch.zeros(())).to(out.dtype)
            return _leave(group, out)

        experts.register_forward_pre_hook(before)
        experts.register_forward_hook(behind)

    def _cut(self, weight: Any, dim: int) -> None:
        """Leave this process's part of a weight."""
        name, group = self.names[weight], self.group
        box = self.boxes.get(name) or whole_box(weight.shape)
        self.boxes[name] = box.cut(dim, group.rank, group.size)
        weight.data = weight.data.chunk(group.size, dim)[group.rank].clone()


class _DividedOutputs(FusedLinear):
    """Linears of which each process of a group computes some outputs."""

    def __init__(self, group: Group, *parts: ExactLinear):
        super().__init__(*parts)
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        (x,) = _Enter.apply(self.group, x)  # type: ignore[no-untyped-call]
        return super().__call__(x)


def _leave(group: Group, x: Tensor) -> Tensor:
    return _Leave.apply(group, x)  # type: ignore[no-any-return, no-untyped-call]


class _Enter(torch.autograd.Function):
    """The identity, whose gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(ctx.group.sum(grad, "gradients of a layer") for grad in grads)


class _Leave(torch.autograd.Function):
    """The sum over a group, whose gradient every process has."""

    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor) -> Tensor:
        return group.sum(x, "outputs of a layer")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]
