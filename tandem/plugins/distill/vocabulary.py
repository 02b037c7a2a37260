"""A divergence between two models' distributions over the vocabulary, chunk by chunk.

[N, V] never exists. Which divergence it is (KL, Jensen-Shannon) the caller says.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem.model.expert_choices import ExpertChoices
from tandem.model.forward import batch_head
from tandem.model.kernels import kernels_of
from tandem.model.logprobs import Head, chunks, log_distribution
from tandem.types import Microbatch, SamplingDistribution

if TYPE_CHECKING:
    from tandem.model.load import ExactModel

# Log-probs of student and teacher, [n, V] each -> (nats [n], their slope [n, V] in the student's
# logits)
Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def divergences(student: Head, teacher: Head, temperature: float, divergence: Divergence) -> Tensor:
    """Compute the divergence of two tempered distributions at N positions: float32 [N], nats.

    It is differentiable in the student's hidden states and projection. Neither projection has a
    bias or a soft cap.
    """
    sampling = SamplingDistribution(temperature=temperature)
    return _Divergences.apply(*student[:3], *teacher[:3], sampling, divergence)  # type: ignore[no-any-return]


class _Divergences(torch.autograd.Function):
    """Autograd function over hidden states; its backward computes both models' logits again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, ctx.sampling, ctx.divergence = arguments
        hidden, weight, *_ = tensors
        values = hidden.new_empty(len(hidden), dtype=torch.float32)
        for rows in chunks(len(hidden), weight):
            values[rows], _ = ctx.divergence(*_tables(tensors, rows, ctx.sampling))
        ctx.save_for_backward(*tensors)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        hidden, weight, *_ = tensors
        grad_hidden = torch.empty_like(hidden)
        wanted, kernels = ctx.needs_input_grad[1], kernels_of(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted else None
        for rows in chunks(len(hidden), weight):
            _, slope = ctx.divergence(*_tables(tensors, rows, ctx.sampling))
            slope.mul_(grads[0][rows, None] / ctx.sampling.temperature)
            grad_hidden[rows] = kernels.gradient_product(slope, weight)
            if grad_weight is not None:
                kernels.weight_gradient(slope, hidden[rows], grad_weight)
        return grad_hidden, grad_weight, *(None for _ in range(6))


def _tables(
    tensors: list[Tensor], rows: slice, sampling: SamplingDistribution
) -> tuple[Tensor, Tensor]:
    """Compute the log-probs of student and teacher, each [n, V]."""
    hidden, weight, packed, *teacher = tensors
    heads = Head(hidden, weight, packed), Head(*teacher)  # type: ignore[arg-type]
    student, held = (log_distribution(head.logits(rows), sampling) for head in heads)
    return student, held


def teacher_divergences(
    student: "ExactModel",
    teacher: "ExactModel",
    batch: Microbatch,
    temperature: float,
    divergence: Divergence,
    choices: ExpertChoices | None = None,
) -> Tensor:
    """Compute the divergence over the vocabulary at the place of each target, float32 [N].
    choices: of the student's experts."""

    def compute() -> Tensor:
        with torch.no_grad():
            teacher_head = teacher(lambda: batch_head(teacher, batch))
        student_head = batch_head(student, batch, choices)
        values = divergences(student_head, teacher_head, temperature, divergence)
        return student.row_parts.gather(values, batch)

    found: Tensor = student(compute)
    return found.cpu()
