"""Fused AdamW with a schedule and clipping whose bits do not depend on the thread count; others are
in muon.py and plugins/optim.

Weights that run in another type than float32 have masters: float32 copies that gradients and
updates go to. Engine and trainer run the masters rounded once, so an update below the spacing of
bfloat16 is kept (Micikevicius et al. 2018, arXiv 1710.03740, section 3.1).

A master that starts at its weight must move by half of that spacing before the weight changes, and
a run of RL may end earlier. So masters start beside their weights, by less than rounding takes away
(a fixed dither: Roberts 1962, doi 10.1109/TIT.1962.1057702). Then the first update changes some of
many weights, and in the mean weights move as their masters do.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from tandem.model.boxes import Box, whole_box
from tandem.runtime.rng import address
from tandem.types import Array

BUCKET = 1 << 26  # parameters whose offloaded state is on the device at once: 768 MiB
PRIMES = (2, 3, 5, 7, 11, 13)  # multiples of their roots, modulo 1, are spread evenly (Richtmyer)
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The learning rate over a run's steps, and what else a step depends on."""

    learning_rate: float  # at its peak
    total_steps: int
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    muon_momentum: float = 0.95


class Whole:
    """Arithmetic over whole tensors by name: here of one process that holds all of each."""

    own: dict[str, Box] | None = None  # the parts that this process holds; None: all of each
    dtype: torch.dtype | None = None  # that these are rounded to before they run; None: their own

    def counted(self, name: str) -> bool:
        """Tell whether this process's part of a tensor counts, and is saved: of equal parts one
        does."""
        return True

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Compute the L2 norm over all gradients."""
        return global_norm(gradients.values())

    def map_whole(
        self, tensors: Mapping[str, Tensor], function: Callable[[str, Tensor], Tensor]
    ) -> Iterable[tuple[str, Tensor]]:
        """Yield function(name, whole tensor) for each name, or the part of it that this process
        holds."""
        return ((name, function(name, tensor)) for name, tensor in tensors.items())


WHOLE = Whole()


class Optimizer:
    """AdamW over named parameters, or their masters. `update` clips, steps and clears the
    gradients.

    whole: of the tensors that these parameters are, or are parts of. Optimizers of other names are
    subclasses (registry.py: "optimizers").
    """

    adam_class: type[torch.optim.AdamW] = torch.optim.AdamW

    def __init__(
        self, parameters: dict[str, nn.Parameter], settings: Settings, *, whole: Whole = WHOLE
    ):
        self.parameters, self.settings, self.whole, self.step = parameters, settings, whole, 0
        # what AdamW steps: a master, or the parameter itself
        self.masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in parameters.items()
        }
        for name, p in parameters.items():
            p.grad_dtype = torch.float32
            if (whole.dtype or p.dtype) != torch.float32:
                box = whole.own[name] if whole.own else whole_box(p.shape)
                dither(self.masters[name], name, box)
        of_adam = [p for name, p in self.masters.items() if not self.has_momentum(name, p)]
        decayed = [p for p in of_adam if p.dim() > 1]
        plain = [p for p in of_adam if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.adam = self.adam_class(
            [g for g in groups if g["params"]],
            lr=settings.learning_rate,
            betas=settings.betas,
            fused=True,
        )

    @staticmethod
    def has_momentum(name: str, weight: Tensor) -> bool:
        """Tell whether a parameter has a momentum where AdamW has two moments."""
        return False

    @staticmethod
    def moment_bytes(shape: tuple[int, ...]) -> int:
        """Return the bytes of AdamW's moments of a parameter."""
        return 8 * math.prod(shape)

    @staticmethod
    def moment_boxes(name: str, box: Box) -> dict[str, Box]:
        """Return the parts of the state that go with a part of a weight, by key of `state`."""
        return {f"{moment}.{name}": box for moment in MOMENTS} | {f"step.{name}": whole_box(())}

    def update(self, *, skip: bool = False) -> dict[str, float]:
        """Make one step, unless the norm is not finite; return grad_norm (before clipping) and
        learning_rate."""
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        norm = self.whole.norm(grads)
        given = self.settings
        share = factor(given.schedule, self.step, given.warmup_steps, given.total_steps)
        rate = given.learning_rate * share
        skip = skip or not math.isfinite(norm)
        if not skip:
            if norm > given.max_grad_norm:
                torch._foreach_mul_(list(grads.values()), given.max_grad_norm / norm)
            for group in self.adam.param_groups:
                group["lr"] = rate
            self._step(rate)
            # the fused kernel does not count its writes, and the linear packs are renewed by that
            # count
            torch.autograd.graph.increment_version(list(self.parameters.values()))
            self.step += 1
        for p in (*self.parameters.values(), *self.masters.values()):
            p.grad = None
        return {"grad_norm": norm, "learning_rate": rate, "skipped_updates": float(skip)}

    def _step(self, rate: float) -> None:
        """Step the masters by the parameters' gradients, and write them into their parameters."""
        for name, p in self.parameters.items():
            self.masters[name].grad = p.grad
        self._step_masters(rate)
        self._round()

    def _step_masters(self, rate: float) -> None:
        self.adam.step()

    @torch.no_grad()
    def _round(self) -> None:
        """Write the masters into their parameters."""
        names = [name for name, p in self.parameters.items() if p is not self.masters[name]]
        if names:
            rounded = [self.parameters[name].detach() for name in names]
            torch._foreach_copy_(rounded, [self.masters[name] for name in names])
            torch.autograd.graph.increment_version(rounded)  # it may not count its writes

    def weights(self) -> dict[str, Tensor]:
        """Return the float32 weights that the next update starts from, by parameter name."""
        return {name: p.detach() for name, p in self.masters.items()}

    def state(self) -> dict[str, Tensor]:
        """Return the moments by parameter name, as "exp_avg.NAME"; none before the first update."""
        return {
            f"{moment}.{name}": tensor
            for name, p in self.masters.items()
            if p in self.adam.state
            for moment, tensor in self.adam.state[p].items()
        }

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
            self.adam.state[self.masters[name]][moment] = self._home(key, tensor)
        self.step = step

    def _home(self, key: str, tensor: Tensor) -> Tensor:
        """Copy a tensor of the state to where it rests between updates."""
        return tensor.to(self.parameters[key.partition(".")[2]].device, copy=True)


@torch.no_grad()
def dither(master: Tensor, name: str, box: Box) -> None:
    """Round a float32 tensor to bfloat16, and move each number by less than half of the spacing, so
    that it rounds to the same. The offsets are spread evenly; a number's place in the whole tensor
    and the tensor's name decide. box: of the tensor in the whole one."""
    places = torch.tensor(address(name) & 0xFFFF, dtype=torch.int32, device=master.device)
    for first, count, prime in zip(box.start, box.shape, PRIMES, strict=False):
        numbers = torch.arange(first, first + count, device=master.device)
        multiples = numbers * (round(math.sqrt(prime) * 65536) | 1) & 0xFFFF
        places = places[..., None] + multiples.int()
    master.copy_(master.bfloat16())
    # as integers floats are in the order of their sizes, 65,536 to the next of bfloat16; | 1: never
    # a half, which might round away; zeros have no neighbours that an update could miss
    places.bitwise_and_(0xFFFF).bitwise_or_(1).sub_(0x8000).mul_(master != 0)
    master.view(torch.int32).add_(places)


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
    # not sum(), which since Python 3.12 has other bits than parts added up
    for squares in row_squares([(tensor, len(tensor)) for tensor in tensors]):
        total += float(squares.sum())
    return math.sqrt(total)


def row_squares(tensors: Iterable[tuple[Tensor, int]]) -> list[Array]:
    """Compute the squared norms of each tensor's rows, float64, by torch in each row; a tensor of
    one row has its elements' squares, which numpy sums with one thread. A GPU is waited for once.

    With each tensor the number of rows of the whole one, of which this may be a part.
    """
    norms = []
    for tensor, num_rows in tensors:
        rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor[:, None]
        if num_rows == 1:
            norms.append(rows.flatten().float())
            continue
        # torch would split a single row among its threads
        each = torch.linalg.vector_norm(rows.expand(max(2, len(rows)), -1), dim=1)
        norms.append(each[: len(rows)].float())
    if not norms:
        return []
    whole = np.square(torch.cat(norms).cpu().numpy().astype(np.float64))
    return np.split(whole, np.cumsum([len(part) for part in norms])[:-1])
