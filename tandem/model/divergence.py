"""Reverse KL between two models over the whole vocabulary, chunk by chunk: [N, V] never exists."""

from typing import Any

import torch
from torch import Tensor

from tandem.model.linear import multiply
from tandem.model.logprobs import Filter, chunks, log_distribution, row_sums

Head = tuple[Tensor, Tensor, Tensor]  # hidden states [N, D], output projection [V, D], its pack


def reverse_kl(student: Head, teacher: Head, temperature: float) -> Tensor:
    """sum_v p (log p - log q) at each of N positions, nats, p the student's and q the teacher's tempered distribution.

    float32 [N], differentiable in the student's hidden states and projection (MiniLLM, arXiv 2306.08543; GKD, arXiv
    2306.13649, with the teacher as the target).
    """
    return _ReverseKL.apply(*student, *teacher, Filter(temperature=temperature))  # type: ignore[no-any-return]


class _ReverseKL(torch.autograd.Function):
    """Saves hidden states only; the backward pass computes both models' logits again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, ctx.how = arguments
        hidden, weight, *_ = tensors
        divergence = hidden.new_empty(len(hidden))
        for rows in chunks(len(hidden), len(weight)):
            own, gap = _tables(tensors, rows, ctx.how)
            divergence[rows] = row_sums(own.exp_().mul_(gap))
        ctx.save_for_backward(*tensors, divergence)
        return divergence

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, divergence = ctx.saved_tensors
        hidden, weight, *_ = tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in chunks(len(hidden), len(weight)):
            own, gap = _tables(tensors, rows, ctx.how)
            # d KL / d z_v = p_v (log p_v - log q_v - KL), z the tempered logits
            slope = own.exp_().mul_(gap.sub_(divergence[rows, None])).mul_(grads[0][rows, None] / ctx.how.temperature)
            grad_hidden[rows] = slope @ weight
            if grad_weight is not None:
                grad_weight.addmm_(slope.t(), hidden[rows])
        return grad_hidden, grad_weight, *(None for _ in range(5))


def _tables(tensors: list[Tensor], rows: slice, how: Filter) -> tuple[Tensor, Tensor]:
    """(log p, log p - log q), each [n, V]"""
    hidden, _, packed, teacher_hidden, _, teacher_packed = tensors
    own = log_distribution(multiply(hidden[rows], packed), how)
    return own, own - log_distribution(multiply(teacher_hidden[rows], teacher_packed), how)
