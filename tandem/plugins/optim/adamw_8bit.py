"""AdamW whose moments of matrices take 8 bits a number between updates: block-wise quantization to
the levels of a dynamic data type (Dettmers et al. 2022, arXiv 2110.02861, sections 2.1 and 2.2).

    state of a matrix [.., L]    exp_avg, exp_avg_sq                uint8    [.., L]
                                 exp_avg_scale, exp_avg_sq_scale    float32  [.., ceil(L / 256)]

Norms, biases and all arithmetic stay float32. Two things differ from the paper. A block ends with
its row, so processes that hold some rows each have the bits of one that holds all. And the second
moment is kept as its square root, as in Gonzalez Ortiz et al. 2026 (arXiv 2602.23349): its small
values then reach as far down as those of the first moment, which would be divided by zero where
the second one is rounded to zero before it.

Neither torchao nor bitsandbytes is used: torchao's needs a C++ compiler or runs many times slower,
and the blocks of both go across rows. It works on the device of the weights.
"""

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.adamw import adamw

from tandem.model.boxes import Box
from tandem.trainer.optimizer import MOMENTS, Optimizer

BLOCK = 256  # numbers with a scale of their own, of one row
CHUNK = 1 << 22  # numbers of a matrix whose moments are float32 at once
SCALE = "_scale"  # name of a moment's scales, after its own
_DECADES = 7
_PLACES, _DROPPED = 1 << 19, 13  # sign, exponent and ten fraction bits; the bits after them
_LEAST = torch.finfo(torch.float32).tiny


class AdamW8bit(torch.optim.AdamW):
    """AdamW that steps each matrix by chunks of rows, whose moments it unpacks and packs again."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(_first_state(parameter))
        if parameter.dim() < 2:
            moments = state["exp_avg"], state["exp_avg_sq"]
            return _update(group, parameter, gradient, moments, state["step"])
        count = state["step"].clone()
        rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in (parameter, gradient)]
        packed = {name: t.view(-1, t.shape[-1]) for name, t in state.items() if name != "step"}
        size = max(1, CHUNK // parameter.shape[-1])
        for first in range(0, len(rows[0]), size):
            chunk = {name: tensor[first : first + size] for name, tensor in packed.items()}
            mean = dequantize(chunk["exp_avg"], chunk[f"exp_avg{SCALE}"], signed=True)
            root = dequantize(chunk["exp_avg_sq"], chunk[f"exp_avg_sq{SCALE}"], signed=False)
            moments = mean, root.square_()
            part, slope = (tensor[first : first + size] for tensor in rows)
            _update(group, part, slope, moments, count.clone())
            for name, values in (("exp_avg", mean), ("exp_avg_sq", moments[1].sqrt_())):
                codes, scales = quantize(values, signed=name == "exp_avg")
                chunk[name].copy_(codes)
                chunk[f"{name}{SCALE}"].copy_(scales)
        state["step"] += 1


class Optimizer8bit(Optimizer):
    """The optimizer `adamw_8bit`."""

    adam_class = AdamW8bit

    @staticmethod
    def moment_bytes(shape: tuple[int, ...]) -> int:
        """Return 2 bytes a number and a scale a block; of a vector float32."""
        if len(shape) < 2:
            return 8 * sum(shape)
        *outer, length = shape
        return 2 * torch.Size(outer).numel() * (length + 4 * num_blocks(length))

    @staticmethod
    def moment_boxes(name: str, box: Box) -> dict[str, Box]:
        scales = {f"{moment}{SCALE}.{name}": scale_box(box) for moment in MOMENTS}
        return Optimizer.moment_boxes(name, box) | scales


def quantize(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantize float32 rows [R, L]: return the largest magnitude of each block [R, blocks], and the
    levels [R, L], uint8, of the numbers' ratios to it. signed: some may be negative.

    A ratio's level is the nearest one to its first ten fraction bits, found in a table: a search
    takes 30 times as long. The error is at most half the spacing of the levels there, and 1 / 2048
    of the number.
    """
    length, blocks = values.shape[1], num_blocks(values.shape[1])
    padded = functional.pad(values, (0, blocks * BLOCK - length)) if length % BLOCK else values
    padded = padded.unflatten(1, (blocks, -1))
    scales = padded.abs().amax(2)
    ratios = padded / scales.clamp_min(_LEAST)[:, :, None]
    places = (ratios.view(torch.int32) >> _DROPPED).bitwise_and_(_PLACES - 1)
    codes = _tables(signed, values.device)[1].index_select(0, places.flatten())
    return codes.view(len(values), -1)[:, :length], scales


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the float32 rows [R, L] that `quantize` has made codes and scales of, as levels."""
    levels, _ = _tables(signed, codes.device)
    ratios = levels.index_select(0, codes.flatten().int()).view(codes.shape)
    return ratios.mul_(scales.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]])


def num_blocks(length: int) -> int:
    """Return the blocks of a row."""
    return -(-length // BLOCK)


def scale_box(box: Box) -> Box:
    """Return the box of the scales that belong to a part of a matrix, which has whole rows."""
    *start, _ = box.start
    blocks = num_blocks(box.shape[-1])
    return Box((*start, 0), (*box.shape[:-1], blocks), (*box.whole[:-1], blocks))


def dynamic_levels(*, signed: bool) -> list[float]:
    """Return the 256 levels from -1 or 0 to 1, in their order: decade after decade towards zero has
    half as many."""
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2 ** (decade + (not signed))
        bounds = [0.1 + 0.9 * number / count for number in range(count + 1)]
        means = [(a + b) / 2 * 10.0 ** (decade - _DECADES + 1) for a, b in pairwise(bounds)]
        found += [*means, *(-mean for mean in means)] if signed else means
    return sorted(found)


@cache
def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the levels, and the nearest one's number for each first 19 bits of a float32."""
    levels = torch.tensor(dynamic_levels(signed=signed))
    middles = (torch.arange(_PLACES, dtype=torch.int32) << _DROPPED) + (1 << (_DROPPED - 1))
    codes = torch.bucketize(middles.view(torch.float32), (levels[:-1] + levels[1:]) / 2)
    return levels.to(device), codes.to(torch.uint8).to(device)


def _first_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the state before the first step: zeros, in the codes of quantized zeros."""
    state = {"step": torch.zeros((), device=parameter.device)}
    if parameter.dim() < 2:
        return state | {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    *outer, length = parameter.shape
    for name in ("exp_avg", "exp_avg_sq"):
        zero = dynamic_levels(signed=name == "exp_avg").index(0.0)
        state[name] = torch.full_like(parameter, zero, dtype=torch.uint8)
        state[f"{name}{SCALE}"] = parameter.new_zeros(*outer, num_blocks(length))
    return state


def _update(
    group: dict[str, Any],
    weight: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    count: Tensor,
) -> None:
    """Step a weight, its moments and its count of steps by torch's fused kernel."""
    beta1, beta2 = group["betas"]
    adamw(
        [weight],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [count],
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )
