"""Experts and routers of transformers' mixtures of experts on the exact linear, for general.py.

One expert runs at a time, in the order of their numbers, as in experts.py. Experts are replaced
through transformers' ExpertsInterface. The rest keeps its own code, in which torch's functions are
exact while a pass runs.
"""

from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tandem.model.activations import ExactActivation
from tandem.model.linear import PackedWeight, linear
from tandem.model.onednn import padded_rows

EXPERTS = "tandem_exact"  # its name in transformers' ExpertsInterface
SIGMOID, SILU = ExactActivation("sigmoid"), ExactActivation("silu")


class ExactFunctions(TorchFunctionMode):
    """Runs the functions of torch that routers call, and whose rows depend on each other, as exact
    ones."""

    def __init__(self) -> None:
        super().__init__()
        self.packs: dict[int, PackedWeight] = defaultdict(PackedWeight)  # by the id of a weight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        if func in (torch.sigmoid, F.sigmoid, Tensor.sigmoid):
            return SIGMOID(*args)
        return SILU(args[0]) if func is F.silu else func(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # a weight that was made just now may have the address of another one
        kept = isinstance(weight, nn.Parameter)
        pack = self.packs[id(weight)] if kept else PackedWeight()
        flat = linear(x.reshape(-1, x.shape[-1]), weight, bias, pack.of(weight))
        return flat.view(*x.shape[:-1], -1)


def make_experts_exact(module: Any) -> ExactFunctions | None:
    """Make every expert of a transformers module exact, in place; return what makes its routers so
    during a pass. None: it has no experts."""
    from transformers.integrations.moe import ExpertsInterface

    functions = ExactFunctions()
    owners = [part for part in module.modules() if hasattr(part, "is_transposed")]
    for part in owners:
        part.packs = [(PackedWeight(), PackedWeight()) for _ in range(len(part.down_proj))]
        functions.packs.update((id(pack), pack) for pair in part.packs for pack in pair)
    if not owners:
        return None
    ExpertsInterface.register(EXPERTS, _run_experts)
    module.set_experts_implementation(EXPERTS)
    return functions


def _run_experts(module: Any, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Map x [T, D] to [T, D]; chosen int64 [T, k] and scores [T, k] are the router's. transformers
    calls it in place of an experts module's forward pass."""
    up = module.gate_up_proj if module.has_gate else module.up_proj
    up_bias = down_bias = None
    if module.has_bias:
        up_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        down_bias = module.down_proj_bias
    out = torch.zeros(x.shape, device=x.device)
    for number, packs in enumerate(module.packs):
        token, place = torch.where(chosen == number)
        if not len(token):
            continue
        # whole rows of vectors: torch's own activations round the rest of a row otherwise
        rows = F.pad(token, (0, padded_rows(len(token)) - len(token)))
        inner = _product(module, x[rows], up, up_bias, number, packs[0])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        value = _product(module, inner, module.down_proj, down_bias, number, packs[1])
        weighed = value[: len(token)] * scores[token, place, None]
        out = out.index_add(0, token, weighed.float())
    return out.to(x.dtype)


def _product(
    module: Any, x: Tensor, weights: Tensor, biases: Tensor | None, number: int, pack: PackedWeight
) -> Tensor:
    weight = weights[number].t() if module.is_transposed else weights[number]
    return linear(x, weight, None if biases is None else biases[number], pack.of(weight))
