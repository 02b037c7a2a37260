"""The exact linear shared by engine and trainer: a row's output bits do not depend on other rows.

The product is the kernels' (kernels.py). Backward is onednn.py's: gradients are deterministic, not
batch-invariant, and made only where wanted. A pack is renewed by the version counters of the weight
and of its adapter, so a stale one cannot be used. This file knows no layers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.model.kernels import kernels_of
from tandem.model.onednn import TILE_TERMS, in_float32, product


class Adapter(NamedTuple):
    """A low-rank update of a weight, scaling * b @ a (LoRA, Hu et al. 2021, section 4.1).

    a is [r, I], b is [O, r].
    """

    a: Tensor
    b: Tensor
    scaling: float


class Part(NamedTuple):
    """One linear among several of the same input: weight [O, I], bias [O], adapter."""

    weight: Tensor
    bias: Tensor | None = None
    adapter: Adapter | None = None

    def merged(self) -> Tensor:
        """Compute the weight [O, I] with its adapter, detached; a plain one is not copied."""
        if self.adapter is None:
            weight = self.weight.detach()
            numbers = getattr(weight, "numbers", None)  # of a QuantizedWeight
            return weight if numbers is None else numbers()  # type: ignore[no-any-return]
        a, b, scaling = self.adapter
        weight, a, b = (t.detach().float().contiguous() for t in (self.weight, a, b))
        return torch.addmm(weight, b, a, alpha=scaling).to(self.weight.dtype)

    def chunk(self, count: int) -> "list[Part]":
        """Split the inputs into `count` equal runs: parts without the bias."""
        weights = self.weight.chunk(count, 1)
        if self.adapter is None:
            return [Part(weight) for weight in weights]
        adapters = [self.adapter._replace(a=a) for a in self.adapter.a.chunk(count, 1)]
        return [Part(w, None, own) for w, own in zip(weights, adapters, strict=True)]

    def version(self) -> tuple[int, ...]:
        """Collect PyTorch's version counters of the tensors behind the merged weight."""
        if self.adapter is None:
            return (self.weight._version,)
        return self.weight._version, self.adapter.a._version, self.adapter.b._version


class PackedWeight:
    """The pack of one weight, or of several stacked.

    It is renewed once a weight has changed in place (an optimizer step, a load); unless `kept`, at
    each use.
    """

    moves = 0  # in this process: until there are more, the addresses of those kept are good

    def __init__(self) -> None:
        self.kept = True
        self._versions: tuple[int, ...] = ()
        self._packed: Tensor | None = None
        self._owned = False  # it is never a weight's own memory

    def of(self, weight: Tensor) -> Tensor:
        return self.of_parts((Part(weight),))

    def of_parts(self, parts: Sequence[Part]) -> Tensor:
        """Pack the merged weights: an adapter is free in a forward pass, and no merged weight is
        kept beside the pack."""
        if not self.kept:
            return _pack_parts(parts)
        own = kernels_of(parts[0].weight)
        versions = (id(own), *(version for part in parts for version in part.version()))
        if self._packed is None or self._versions != versions:
            owned = len(parts) > 1 or parts[0].adapter is not None  # else it may be the weight
            stays = own.packs_stay and (versions[0], owned) == (*self._versions[:1], self._owned)
            old = self._packed if stays else None
            # unless it stays, free the old pack before the new one is made
            self._packed, self._versions, self._owned = None, versions, owned
            self._packed = packed = _pack_parts(parts)
            if old is not None and owned and old.shape == packed.shape:
                self._packed = old.copy_(packed)
            elif old is None or old.data_ptr() != packed.data_ptr():
                PackedWeight.moves += 1
        return self._packed


def _pack_parts(parts: Sequence[Part]) -> Tensor:
    merged = [part.merged() for part in parts]
    weight = merged[0] if len(merged) == 1 else torch.cat(merged)
    return kernels_of(weight).pack(weight)


class PackOwner(nn.Module):
    """A part of a model that has packs of weights."""

    def packs(self) -> list[PackedWeight]:
        raise NotImplementedError


class ExactLinear(PackOwner):
    """nn.Linear with the exact forward, on the same parameters, so names and ties stay.

    With an adapter (lora_A, lora_B) it runs the merged weight. While `base_only` is set it runs the
    base weight alone, from a second pack that is kept; set it only if there is an adapter. leave:
    sums the products of processes that each have a part of the inputs; the bias is added to it.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        lora_A: nn.Linear | None = None,
        lora_B: nn.Linear | None = None,
        scaling: float = 0.0,
    ):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.lora_A, self.lora_B, self.scaling = lora_A, lora_B, scaling
        self.pack, self.base_pack = PackedWeight(), PackedWeight()
        self.base_only = False
        self.leave: Callable[[Tensor], Tensor] | None = None
        self._slices: list[tuple[PackedWeight, PackedWeight]] = []

    def split(self, count: int) -> None:
        """Sum `count` products over as many inputs each: to the bits of processes that `leave`."""
        self._slices = [(PackedWeight(), PackedWeight()) for _ in range(count if count > 1 else 0)]
        PackedWeight.moves += 1

    def forward(self, x: Tensor) -> Tensor:
        flat, part = x.reshape(-1, x.shape[-1]), self.active_part()
        if self.in_parts:
            return self._sum(flat, part).view(*x.shape[:-1], -1)
        out = fused_linear(flat, *packed_parts(self, (self,)))
        return out.view(*x.shape[:-1], len(part.weight))

    @property
    def in_parts(self) -> bool:
        """Tell whether the output is a sum of several products."""
        return bool(self._slices) or self.leave is not None

    def _sum(self, x: Tensor, part: Part) -> Tensor:
        packs = self._slices or [(self.pack, self.base_pack)]
        inputs, parts = x.chunk(len(packs), 1), part.chunk(len(packs))
        products = [
            fused_linear(x.contiguous(), (own,), pair[self.base_only].of_parts((own,)))
            for x, own, pair in zip(inputs, parts, packs, strict=True)
        ]
        total = sum_in_order(products)
        total = total if self.leave is None else self.leave(total)
        return total if part.bias is None else total + part.bias

    def packs(self) -> list[PackedWeight]:
        return [self.pack, self.base_pack, *(pack for pair in self._slices for pack in pair)]

    def active_part(self) -> Part:
        """Return the tensors that a forward pass uses now."""
        return Part(self.weight, self.bias) if self.base_only else self.adapted_part()

    def adapted_part(self) -> Part:
        """Return the tensors with the adapter, if there is one."""
        if self.lora_A is None or self.lora_B is None:
            return Part(self.weight, self.bias)
        adapter = Adapter(self.lora_A.weight, self.lora_B.weight, self.scaling)
        return Part(self.weight, self.bias, adapter)

    def merged(self) -> Tensor:
        """Compute the weight with the adapter, in the shape of the base weight."""
        return self.adapted_part().merged()


class ExactConv1D(ExactLinear):
    """transformers' Conv1D (GPT-2), a linear whose weight is [I, O], with the exact forward on the
    same parameters; an adapter's factors are as those of other linears."""

    def active_part(self) -> Part:
        return Part(self.weight.t(), self.bias) if self.base_only else self.adapted_part()

    def adapted_part(self) -> Part:
        part = super().adapted_part()
        return part._replace(weight=part.weight.t())

    def merged(self) -> Tensor:
        return super().merged().t().contiguous()


def is_conv1d(module: Any) -> bool:
    """Tell whether a module is transformers' Conv1D, without importing transformers."""
    return type(module).__name__ == "Conv1D"


def replace_parts(module: nn.Module, made: Callable[[Any], nn.Module]) -> None:
    """Replace each part of a module by what is made of it, in place."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            setattr(parent, name, made(child))


class FusedLinear:
    """Several ExactLinears of the same input run as one: x [N, I] to [N, sum of outputs].

    It owns no parameter.
    """

    def __init__(self, *parts: ExactLinear):
        self.parts = parts
        self.pack, self.base_pack = PackedWeight(), PackedWeight()

    def packs(self) -> list[PackedWeight]:
        return [self.pack, self.base_pack]

    def __call__(self, x: Tensor) -> Tensor:
        return fused_linear(x, *packed_parts(self, self.parts))


def packed_parts(
    owner: FusedLinear | ExactLinear, linears: Sequence[ExactLinear]
) -> tuple[list[Part], Tensor]:
    """Return what linears that run as one use now, and its pack, which the owner keeps."""
    parts = [linear.active_part() for linear in linears]
    is_base = any(linear.base_only for linear in linears)
    return parts, (owner.base_pack if is_base else owner.pack).of_parts(parts)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor) -> Tensor:
    """Multiply x [N, I] with weight [O, I] to [N, O]; packed is the weight's pack."""
    return fused_linear(x, (Part(weight, bias),), packed)


def fused_linear(x: Tensor, parts: Sequence[Part], packed: Tensor) -> Tensor:
    """Map x [N, I] to the parts' outputs in their order, [N, sum of O].

    packed is the pack of the parts' merged weights. Differentiable while gradients are on.
    """
    if not torch.is_grad_enabled():
        return kernels_of(x).matmul(x, packed, bias_of(parts))
    tensors: list[Tensor | None] = []
    scalings = []
    for part in parts:
        a, b, scaling = part.adapter or (None, None, 0.0)
        tensors += [part.weight, part.bias, a, b]
        scalings.append(scaling)
    return _FusedLinear.apply(x, packed, scalings, *tensors)  # type: ignore[no-any-return]


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Sum tensors of one shape one after another, in float32; the result is rounded once."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def bias_of(parts: Sequence[Part]) -> Tensor | None:
    biases = [part.bias for part in parts if part.bias is not None]
    return torch.cat(biases) if len(biases) > 1 else biases[0] if biases else None


class _FusedLinear(torch.autograd.Function):
    """The autograd function of `fused_linear`; its tensors are four for each part, in order."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, scalings: list[float], *tensors: Tensor | None
    ) -> Tensor:
        # frozen parameters do not keep the activations alive
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:]) else None, *tensors)
        ctx.scalings = scalings
        return kernels_of(x).matmul(x, packed, bias_of(_parts(tensors, scalings)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved: list[Any] = [grads[0], *ctx.saved_tensors]
        if grads[0].dtype != torch.float32 and in_float32(grads[0]):
            saved = [None if t is None else t.float() for t in saved]
        grad, x, *tensors = saved
        wanted = ctx.needs_input_grad
        parts = _parts(tensors, ctx.scalings)
        above = grad.split([len(part.weight) for part in parts], 1)
        grad_x = _input_gradient(above, parts) if wanted[0] else None
        own = [
            gradient
            for number, (grad, part) in enumerate(zip(above, parts, strict=True))
            for gradient in _part_gradients(x, grad, part, wanted[3 + 4 * number : 7 + 4 * number])
        ]
        return grad_x, None, None, *own


def _parts(tensors: Sequence[Any], scalings: Sequence[float]) -> list[Part]:
    """Make the parts from (weight, bias, a, b) of each, one after another."""
    parts = []
    for n, scaling in enumerate(scalings):
        weight, bias, a, b = tensors[4 * n : 4 * n + 4]
        parts.append(Part(weight, bias, None if a is None else Adapter(a, b, scaling)))
    return parts


def _input_gradient(above: Sequence[Tensor], parts: Sequence[Part]) -> Tensor:
    """Compute the gradient [N, I] from the outputs' gradients, [N, O] each.

    It is the sum of g W + scaling * (g B) A; B A is never formed.
    """
    multiply = kernels_of(above[0]).gradient_product
    total = multiply(above[0], parts[0].weight)
    for grad, part in zip(above[1:], parts[1:], strict=True):
        total += multiply(grad, part.weight)
    for grad, part in zip(above, parts, strict=True):
        if part.adapter is not None:
            inner = product(grad, part.adapter.b).split(TILE_TERMS, 1)
            for own, a in zip(inner, part.adapter.a.split(TILE_TERMS), strict=True):
                total.addmm_(own.to(total.dtype), a.to(total.dtype), alpha=part.adapter.scaling)
    return total


def _part_gradients(
    x: Tensor, grad: Tensor, part: Part, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Compute the wanted gradients of weight, bias, a and b from x [N, I] and grad [N, O]."""
    own = (
        kernels_of(grad).weight_gradient(grad, x) if wanted[0] else None,
        grad.sum(0) if wanted[1] else None,
    )
    if part.adapter is None:
        return *own, None, None
    a, b, scaling = part.adapter
    grad_a = product(product(grad, b).t(), x).mul_(scaling) if wanted[2] else None
    grad_b = product(grad.t(), product(x, a.t())).mul_(scaling) if wanted[3] else None
    return *own, grad_a, grad_b
