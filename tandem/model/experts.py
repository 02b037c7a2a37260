"""Exact mixture of experts: transformers' router and experts on the exact linear.

One expert runs at a time, so a token's output is the sum over its experts in the order of their
numbers and does not depend on the choices of other tokens. No load-balancing loss is added.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.model.linear import PackedWeight, linear, swiglu


class ExactRouter(nn.Module):
    """Qwen3MoeTopKRouter with the exact linear, in place of a router whose parameter it keeps."""

    def __init__(self, router: Any):
        super().__init__()
        self.weight = router.weight
        self.top_k, self.norm_topk_prob = router.top_k, router.norm_topk_prob
        self.hidden_dim = router.hidden_dim
        self.pack = PackedWeight()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map x [..., D] to (logits [T, experts], scores [T, k], chosen experts int64 [T, k])."""
        flat = x.reshape(-1, self.hidden_dim)
        logits = linear(flat, self.weight, None, self.pack.of(self.weight))
        scores, experts = F.softmax(logits.float(), -1).topk(self.top_k, -1)
        if self.norm_topk_prob:
            scores = scores / scores.sum(-1, keepdim=True)
        return logits, scores, experts


class ExactExperts(nn.Module):
    """Qwen3MoeExperts on the exact linear, in place of experts whose parameters it keeps."""

    def __init__(self, experts: Any):
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        count = len(self.gate_up_proj)
        self.packs = [(PackedWeight(), PackedWeight()) for _ in range(count)]

    def forward(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """Map x [T, D] to [T, D]; chosen int64 [T, k] and scores [T, k] are the router's."""
        out = torch.zeros(x.shape, device=x.device)
        weights = zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), self.packs, strict=True)
        for number, (up_weight, down_weight, (up_pack, down_pack)) in enumerate(weights):
            token, place = torch.where(chosen == number)
            if not len(token):
                continue
            inner = swiglu(linear(x[token], up_weight, None, up_pack.of(up_weight)))
            value = linear(inner, down_weight, None, down_pack.of(down_weight))
            out = out.index_add(0, token, value * scores[token, place, None])
        return out.to(x.dtype)
