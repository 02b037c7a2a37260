"""Exact mixture of experts: transformers' router and experts on the exact linear, one expert at a
time.

A token's output is the sum over its experts in the order of their numbers, whatever other tokens
chose. No load-balancing loss is added.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.model.linear import PackedWeight, linear, swiglu


class ExactRouter(nn.Module):
    """Qwen3MoeTopKRouter with the exact linear; it takes over the parameter."""

    def __init__(self, router: Any):
        super().__init__()
        self.weight = router.weight
        self.top_k, self.norm_topk_prob, self.hidden_dim = (
            router.top_k,
            router.norm_topk_prob,
            router.hidden_dim,
        )
        self.pack = PackedWeight()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(
            x.reshape(-1, self.hidden_dim), self.weight, None, self.pack.of(self.weight)
        )
        scores, experts = F.softmax(logits, -1).topk(self.top_k, -1)
        if self.norm_topk_prob:
            scores = scores / scores.sum(-1, keepdim=True)
        return logits, scores, experts


class ExactExperts(nn.Module):
    """Qwen3MoeExperts on the exact linear; it takes over the parameters."""

    def __init__(self, experts: Any):
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        count = len(self.gate_up_proj)
        self.packs = [(PackedWeight(), PackedWeight()) for _ in range(count)]

    def forward(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """x [T, D], chosen int64 [T, k], scores [T, k] -> [T, D]"""
        out = torch.zeros_like(x)
        weights = zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), self.packs, strict=True)
        for number, (up_weight, down_weight, (up_pack, down_pack)) in enumerate(weights):
            token, place = torch.where(chosen == number)
            if not len(token):
                continue
            inner = swiglu(linear(x[token], up_weight, None, up_pack.of(up_weight)))
            value = (
                linear(inner, down_weight, None, down_pack.of(down_weight))
                * scores[token, place, None]
            )
            out = out.index_add(0, token, value)
        return out
