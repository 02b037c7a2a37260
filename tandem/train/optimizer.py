"""Fused AdamW, alone or beside Muon, with a schedule and clipping whose bits do not depend on the
thread count.

Parameters of another type than float32 have masters: float32 copies that gradients and updates go
to. The parameters, which engine and trainer run, are the masters rounded once. An update smaller
than the spacing of bfloat16 is then kept, and counts once several have added up (Micikevicius et
al. 2018, arXiv 1710.03740, section 3.1).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from tandem.plugins.optim.adamw_8bit import AdamW8bit
from tandem.plugins.optim.offload import OffloadedState
from tandem.train.muon import MapWhole, Muon, is_hidden_matrix, map_each
from tandem.types import Array

Norm = Callable[[dict[str, Tensor]], float]  # of gradients by name
Schedule = Literal["constant", "linear", "cosine"]


class Optimizer:
    """AdamW over named parameters, or their masters; with a muon_momentum, Muon over the layers'
    matrices among them. `update` clips, steps and clears the gradients.

    in_8bit: the moments of AdamW's matrices are. offload_bucket: parameters whose state is on the
    device at once; 0: all of it stays there.
    norm, map_whole: of the gradients; others if these parameters are parts of a model.
    """

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
        in_8bit: bool = False,
        offload_bucket: int = 0,
        muon_momentum: float | None = None,
        map_whole: MapWhole = map_each,
        norm: Norm = lambda gradients: global_norm(gradients.values()),
    ):
        self.parameters, self.max_grad_norm = parameters, max_grad_norm
        self.norm = norm
        self.learning_rate, self.schedule = learning_rate, schedule
        self.warmup_steps, self.total_steps, self.step = warmup_steps, total_steps, 0
        # what AdamW steps: a master, or the parameter itself
        self.masters = {name: _master(p) for name, p in parameters.items()}
        for p in parameters.values():
            p.grad_dtype = torch.float32
        self.rounds = any(p is not self.masters[name] for name, p in parameters.items())
        hidden = {}
        if muon_momentum is not None:
            hidden = {n: p for n, p in self.masters.items() if is_hidden_matrix(n, p)}
        self.muon = Muon(
            hidden, weight_decay=weight_decay, momentum=muon_momentum or 0.0, map_whole=map_whole
        )
        others = [p for name, p in self.masters.items() if name not in hidden]
        decayed = [p for p in others if p.dim() > 1]
        plain = [p for p in others if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.adam = (AdamW8bit if in_8bit else torch.optim.AdamW)(
            [g for g in groups if g["params"]], lr=learning_rate, betas=betas, fused=True
        )
        by_master = {self.masters[name]: p for name, p in parameters.items()}
        self.offloaded = (
            OffloadedState(self.adam, by_master, offload_bucket) if offload_bucket else None
        )

    def update(self, *, skip: bool = False) -> dict[str, float]:
        """Make one step, unless the norm is not finite; return grad_norm (before clipping) and
        learning_rate."""
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        norm = self.norm(grads)
        rate = self.learning_rate * factor(
            self.schedule, self.step, self.warmup_steps, self.total_steps
        )
        skip = skip or not math.isfinite(norm)
        if not skip:
            if norm > self.max_grad_norm:
                torch._foreach_mul_(list(grads.values()), self.max_grad_norm / norm)
            for group in self.adam.param_groups:
                group["lr"] = rate
            if self.offloaded is None:
                for name, p in self.parameters.items():
                    self.masters[name].grad = p.grad
                self.adam.step()
                self.muon.step(rate)
                if self.rounds:
                    self._round()
            else:
                self.offloaded.step()
            # the fused kernel does not count its writes, and the linear packs are renewed by that
            # count
            torch.autograd.graph.increment_version(list(self.parameters.values()))
            self.step += 1
        for p in (*self.parameters.values(), *self.masters.values()):
            p.grad = None
        return {"grad_norm": norm, "learning_rate": rate, "skipped_updates": float(skip)}

    @torch.no_grad()
    def _round(self) -> None:
        """Write the masters into their parameters."""
        for name, p in self.parameters.items():
            if p is not self.masters[name]:
                p.copy_(self.masters[name])

    def weights(self) -> dict[str, Tensor]:
        """Return the float32 weights that the next update starts from, by parameter name."""
        return {name: p.detach() for name, p in self.masters.items()}

    def state(self) -> dict[str, Tensor]:
        """Return the moments of AdamW and the momentum of Muon by parameter name; none before the
        first update."""
        moments = {
            f"{moment}.{name}": tensor
            for name, p in self.masters.items()
            if p in self.adam.state
            for moment, tensor in self.adam.state[p].items()
        }
        return moments | {f"momentum.{name}": t for name, t in self.muon.momentum.items()}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take up the weights that `weights` gave."""
        for name, weight in weights.items():
            self.masters[name].copy_(weight)
        self._round()

    def load_state(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Take up the moments and the place in the schedule."""
        for key, tensor in tensors.items():
            moment, _, name = key.partition(".")
            if self.offloaded is not None and moment != "step":
                copy = self.offloaded.to_host(tensor)
            else:
                copy = tensor.to(self.parameters[name].device, copy=True)
            if moment == "momentum":
                self.muon.momentum[name] = copy
            else:
                self.adam.state[self.masters[name]][moment] = copy
        self.step = step


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float())


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
    """Compute the L2 norm over all tensors in a fixed order."""
    total = 0.0
    for tensor in tensors:  # not sum(), which since Python 3.12 has other bits than parts added up
        total += float(row_squares(tensor, len(tensor)).sum())
    return math.sqrt(total)


def row_squares(tensor: Tensor, num_rows: int) -> Array:
    """Compute the squared norms of a tensor's rows, float64, by torch in each row; a tensor of one
    row has its elements' squares, which numpy sums with one thread.

    num_rows: of the whole tensor, of which this may be a part.
    """
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor[:, None]
    if num_rows == 1:
        norms = rows.flatten()
    else:  # torch would split a single row among its threads
        norms = torch.linalg.vector_norm(rows.expand(max(2, len(rows)), -1), dim=1)[: len(rows)]
    return np.square(norms.cpu().numpy().astype(np.float64))
