"""Muon: a momentum whose matrix is brought near to the closest orthogonal one before it is added to
the weight (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), scaled to the size of an
AdamW update so that one learning rate serves both (Liu et al. 2025, arXiv 2502.16982, section 2.2).

It steps the matrices of the layers; AdamW keeps what is no map between hidden states: embedding and
head, norms and biases, routers, and the factors of adapters.

torch.optim.Muon is not used: it multiplies in bfloat16, and then the bits of a CPU depend on the
number of threads (measured: a matrix [128, 2560]), and it has no experts. Each arithmetic operation
here rounds once, so a part of a tensor gets the bits that it has in the whole.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tandem.model.boxes import Box
from tandem.trainer.optimizer import Optimizer, Settings

COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5  # Jordan's
EPSILON = 1e-7  # least norm that a matrix is divided by
ADAMW_RMS = 0.2  # of an update; Liu et al., equation 4
NOT_HIDDEN = (".gate.weight", ".lora_A.weight", ".lora_B.weight")  # router and adapters


def is_hidden_matrix(name: str, weight: Tensor) -> bool:
    """Tell whether Muon steps a parameter, by its Hugging Face name: a matrix of a layer, or its
    experts [experts, O, I]."""
    of_layer = re.search(r"\.\d+\.", name) is not None  # model.layers.0., transformer.h.0.
    return of_layer and weight.dim() > 1 and not name.endswith(NOT_HIDDEN)


class Muon(Optimizer):
    """Muon with Nesterov momentum over the matrices of the layers, beside AdamW over all else."""

    has_momentum = staticmethod(is_hidden_matrix)

    def __init__(self, parameters: dict[str, nn.Parameter], settings: Settings, **whole: Any):
        super().__init__(parameters, settings, **whole)
        self.hidden = {n: p for n, p in self.masters.items() if is_hidden_matrix(n, p)}
        self.momentum: dict[str, Tensor] = {}  # as the weights; none before the first step

    @torch.no_grad()
    def _step_masters(self, rate: float) -> None:
        """Step every weight that has a gradient, which is overwritten."""
        super()._step_masters(rate)
        gradients = {n: w.grad for n, w in self.hidden.items() if w.grad is not None}
        for name, gradient in gradients.items():
            if name not in self.momentum:
                self.momentum[name] = torch.zeros_like(gradient)
            momentum = self.momentum[name].mul_(self.settings.muon_momentum).add_(gradient)
            gradient.add_(momentum * self.settings.muon_momentum)
        for name, update in self.whole.map_whole(gradients, _update_of):
            weight = self.hidden[name].mul_(1 - rate * self.settings.weight_decay)
            weight.sub_(update.mul_(rate))

    @staticmethod
    def moment_boxes(name: str, box: Box) -> dict[str, Box]:
        return Optimizer.moment_boxes(name, box) | {f"momentum.{name}": box}

    def state(self) -> dict[str, Tensor]:
        return super().state() | {f"momentum.{name}": t for name, t in self.momentum.items()}

    def load_state(self, tensors: Mapping[str, Tensor], step: int) -> None:
        own = {key: t for key, t in tensors.items() if key.startswith("momentum.")}
        self.momentum |= {key.partition(".")[2]: self._home(key, t) for key, t in own.items()}
        super().load_state({key: t for key, t in tensors.items() if key not in own}, step)


def _update_of(name: str, tensor: Tensor) -> Tensor:
    """Compute the update of learning rate 1 from a momentum [O, I] or [experts, O, I], matrix by
    matrix; gate and up of an expert are two."""
    if tensor.dim() == 2:
        scale = ADAMW_RMS * math.sqrt(max(tensor.shape))
        return orthogonalized(tensor).mul_(scale)
    halves = 2 if name.endswith("gate_up_proj") else 1
    matrices = [matrix for expert in tensor for matrix in expert.chunk(halves)]
    return torch.cat([_update_of(name, matrix) for matrix in matrices]).view(tensor.shape)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Bring the singular values of a float32 matrix [O, I] to between about 0.7 and 1.2, by a
    Newton-Schulz iteration of a quintic; its singular vectors stay.

    It multiplies in bfloat16 on a GPU, as Jordan does, and in float32 on a CPU.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.t() if tall else matrix).contiguous()
    # the norm of each row first, whose bits no number of threads changes
    rows = torch.linalg.vector_norm(x.expand(max(2, len(x)), -1), dim=1)[: len(x)]
    x = x / max(math.hypot(*rows.tolist()), EPSILON)
    if x.is_cuda:
        x = x.bfloat16()
    for _ in range(ITERATIONS):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.t() if tall else x).float().contiguous()
