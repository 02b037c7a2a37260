"""Exact mixture of experts: transformers' router and experts on the exact linear.

One expert runs at a time, so a token's output is the sum over its experts in the order of their
numbers and does not depend on the choices of other tokens. trainer/routing.py has the statistics of
routers and the loss that balances them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.model.kernels import kernels_of
from tandem.model.linear import PackedWeight, PackOwner, linear, sum_in_order

Expert = Callable[[Tensor], Tensor]  # maps the rows of its tokens [n, D] to [n, D]
# What one expert says: its tokens int64 [n], its place among the k of each int64 [n], and its
# outputs [n, D].
Output = tuple[Tensor, Tensor, Tensor]
# Runs experts on the rows of x [T, D] that chose them, int64 [T, k], counted from the first one;
# other numbers are of experts that another call runs. The outputs come in the experts' order.
Dispatch = Callable[[Sequence[Expert], Tensor, Tensor], Iterable[Output]]


class ExactRouter(PackOwner):
    """Qwen3MoeTopKRouter with the exact linear, in place of a router whose parameter it keeps."""

    def __init__(self, router: Any):
        super().__init__()
        self.weight = router.weight
        self.top_k, self.norm_topk_prob = router.top_k, router.norm_topk_prob
        self.hidden_dim = router.hidden_dim
        self.pack = PackedWeight()
        # called with probabilities [T, experts] and chosen experts int64 [T, k] of each pass
        self.observe: Callable[[Tensor, Tensor], None] | None = None

    def packs(self) -> list[PackedWeight]:
        return [self.pack]

    def forward(
        self, x: Tensor, choose: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map x [..., D] to (logits [T, experts], scores [T, k], chosen experts int64 [T, k]).

        choose: may replace the chosen experts; their scores stay the router's.
        """
        flat = x.reshape(-1, self.hidden_dim)
        logits = linear(flat, self.weight, None, self.pack.of(self.weight))
        probabilities = F.softmax(logits.float(), -1)
        scores, experts = probabilities.topk(self.top_k, -1)
        if choose is not None:
            experts = choose(experts)
            scores = probabilities.gather(-1, experts)
        if self.observe is not None:
            self.observe(probabilities, experts)
        if self.norm_topk_prob:
            scores = scores / scores.sum(-1, keepdim=True)
        return logits, scores, experts


class ExactExperts(PackOwner):
    """Qwen3MoeExperts on the exact linear, in place of experts whose parameters it keeps."""

    def __init__(self, experts: Any):
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        count = len(self.gate_up_proj)
        self.expert_packs = [(PackedWeight(), PackedWeight()) for _ in range(count)]
        self.splits = 1  # sums that make the output, each over as many experts
        self.dispatch: Dispatch | None = None  # if several processes hold the experts of a sum

    def packs(self) -> list[PackedWeight]:
        return [pack for both in self.expert_packs for pack in both]

    def forward(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """Map x [T, D] to [T, D]; chosen int64 [T, k] and scores [T, k] are the router's."""
        weights = self.gate_up_proj.unbind(), self.down_proj.unbind()
        experts = [partial(_run, *own) for own in zip(*weights, self.expert_packs, strict=True)]
        dispatch = self.dispatch or _run_all
        count = len(experts) // self.splits
        sums = []
        for first in range(0, len(experts), count):
            outputs = dispatch(experts[first : first + count], x, chosen - first)
            sums.append(_weighted_sum(outputs, x, scores))
        return sum_in_order(sums)


def _run(
    up_weight: Tensor, down_weight: Tensor, packs: tuple[PackedWeight, PackedWeight], x: Tensor
) -> Tensor:
    inner = kernels_of(x).swiglu(linear(x, up_weight, None, packs[0].of(up_weight)))
    return linear(inner, down_weight, None, packs[1].of(down_weight))


def _run_all(experts: Sequence[Expert], x: Tensor, chosen: Tensor) -> Iterator[Output]:
    """Run the experts one after another, each as its output is asked for."""
    for number, expert in enumerate(experts):
        token, place = torch.where(chosen == number)
        if len(token):
            yield token, place, expert(x[token])


def _weighted_sum(outputs: Iterable[Output], x: Tensor, scores: Tensor) -> Tensor:
    """Sum experts' outputs for x [T, D], each times its score."""
    out = torch.zeros(x.shape, device=x.device)
    for token, place, value in outputs:
        out = out.index_add(0, token, value * scores[token, place, None])
    return out.to(x.dtype)
