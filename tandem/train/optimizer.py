"""Fused AdamW with a schedule and clipping whose bits do not depend on the thread count."""

import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

Schedule = Literal["constant", "linear", "cosine"]


class Optimizer:
    """AdamW over named parameters. `update` clips, steps and clears the gradients."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        *,
        learning_rate: float,
        schedule: Schedule,
        warmup_steps: int,
        total_steps: int,
        weight_decay: float,
        betas: tuple[float, float],
        max_grad_norm: float,
    ):
        self.parameters, self.max_grad_norm = parameters, max_grad_norm
        self.learning_rate, self.schedule = learning_rate, schedule
        self.warmup_steps, self.total_steps, self.step = warmup_steps, total_steps, 0
        decayed = [p for p in parameters.values() if p.dim() > 1]
        plain = [p for p in parameters.values() if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=learning_rate, betas=betas, fused=True
        )

    def update(self, *, skip: bool = False) -> dict[str, float]:
        """Make one step, unless the norm is not finite; return grad_norm (before clipping) and
        learning_rate."""
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = global_norm(grads)
        rate = self.learning_rate * factor(
            self.schedule, self.step, self.warmup_steps, self.total_steps
        )
        skip = skip or not math.isfinite(norm)
        if not skip:
            if norm > self.max_grad_norm:
                torch._foreach_mul_(grads, self.max_grad_norm / norm)
            for group in self.adam.param_groups:
                group["lr"] = rate
            self.adam.step()
            # the fused kernel does not count its writes, and the linear packs are renewed by that
            # count
            torch.autograd.graph.increment_version(list(self.parameters.values()))
            self.step += 1
        self.adam.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "learning_rate": rate, "skipped_updates": float(skip)}

    def state(self) -> dict[str, Tensor]:
        """Return the moments by parameter name; none before the first update."""
        return {
            f"{moment}.{name}": self.adam.state[p][moment]
            for name, p in self.parameters.items()
            if p in self.adam.state
            for moment in ("exp_avg", "exp_avg_sq", "step")
        }

    def load_state(self, tensors: dict[str, Tensor], step: int) -> None:
        """Take up the moments and the place in the schedule."""
        for key, tensor in tensors.items():
            moment, _, name = key.partition(".")
            self.adam.state[self.parameters[name]][moment] = tensor.clone()
        self.step = step


def factor(schedule: Schedule, step: int, warmup: int, total: int) -> float:
    """Return the share of the peak learning rate at a step counted from 0; linear and cosine end at
    0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))


def global_norm(tensors: Iterable[Tensor]) -> float:
    """Compute the L2 norm over all tensors in a fixed order: rows by torch, rows' sums by numpy
    (one thread)."""
    squares = 0.0
    for tensor in tensors:
        rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor[:, None]
        norms = torch.linalg.vector_norm(rows, dim=1) if rows.shape[0] > 1 else rows.flatten()
        squares += float(np.square(norms.numpy().astype(np.float64)).sum())
    return math.sqrt(squares)
