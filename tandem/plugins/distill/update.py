"""On-policy distillation (arXiv 2306.13649): the student's own episodes, graded token by token by a
teacher. Rewards are logged and not trained on."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tandem.model.expert_choices import ExpertChoices, replayed_experts
from tandem.model.forward import batch_head, reference_logprobs
from tandem.model.kernels import kernels_of
from tandem.model.logprobs import Head, chunks, log_distribution
from tandem.plugins.distill.divergences import divergence, sampled_advantages
from tandem.rl.losses import Metrics, total
from tandem.trainer.batch import Models, TrainBatch, compute_logprobs, pack_batch, token_weights
from tandem.trainer.learn import (
    SKIPPED,
    LearnStage,
    Observe,
    off_policy_weights,
    reduce_metrics,
    update_policy,
)
from tandem.trainer.pack import join
from tandem.types import Group, Microbatch, Row, SamplingDistribution

if TYPE_CHECKING:
    from tandem.model.load import ExactModel
# Log-probs of student and teacher, [n, V] each -> (nats [n], their slope [n, V] in the student's
# logits)
Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def distill(
    stage: LearnStage, groups: Sequence[Group], version: int, observe: Observe | None = None
) -> Row:
    """Make a step's updates towards the teacher; "teacher_kl" is the mean divergence from it, nats
    a token.

    The exact estimator compares the tempered distributions; top-k, top-p and min-p count for
    sampling only.
    """
    config, policy, sampling = stage.config, stage.models.policy, stage.sampling
    teacher = stage.models.teacher
    assert teacher is not None, "what is distilled"
    batch = pack_batch(groups, config, stage.models.policy.ranks, learns_rewards=False)
    if not batch.sample_index:
        return dict(SKIPPED)
    minibatches = batch.minibatches * config.rl.epochs
    if config.distill.estimator == "exact":
        rows = [_update_exact(stage, teacher, batch, minibatch) for minibatch in minibatches]
        return reduce_metrics(rows)
    compute_logprobs(batch, Models(policy=policy), config.rl, sampling)
    graded = batch.forward_all(teacher, lambda b: reference_logprobs(teacher, b, sampling))
    batch.advantages = [
        sampled_advantages(own, other) for own, other in zip(batch.proximal, graded, strict=True)
    ]
    metrics = stage.parity.before_update(batch, policy, version)
    metrics |= off_policy_weights(batch, config.rl)
    rows = [
        update_policy(stage, batch, minibatch, version, first=number == 0, observe=observe)
        for number, minibatch in enumerate(minibatches)
    ]
    teacher_kl = -float(np.mean(np.concatenate(batch.advantages)))
    return {**metrics, **reduce_metrics(rows), "teacher_kl": teacher_kl}


def _update_exact(
    stage: LearnStage, teacher: "ExactModel", batch: TrainBatch, minibatch: Sequence[Microbatch]
) -> Metrics:
    """Make one optimizer step on the divergence over the whole vocabulary."""
    settings, student = stage.config.distill, stage.models.policy
    distance = partial(
        divergence, settings.divergence, beta=settings.jsd_beta, top_k=settings.top_k
    )
    weights, temperature = token_weights(batch, minibatch, stage.config), stage.sampling.temperature

    def loss(microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        choices = replayed_experts(microbatch, student.model.device)
        terms = teacher_divergences(
            student.model, teacher, microbatch, temperature, distance, choices
        )
        weight = torch.from_numpy(join([microbatch], weights)[0])
        return (terms * weight).sum(), {"teacher_kl": total(terms)}

    return student.update(minibatch, loss, frozen=[teacher])


# ---- a divergence over the vocabulary, chunk by chunk: [N, V] never exists


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
    student, held = (log_distribution(head.logits(rows).float(), sampling) for head in heads)
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
