"""On-policy distillation (arXiv 2306.13649): the student's own episodes, graded token by token by a
teacher. Rewards are logged and not trained on."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tandem.model.expert_choices import replayed_experts
from tandem.model.forward import reference_logprobs
from tandem.plugins.distill.divergences import divergence, sampled_advantages
from tandem.plugins.distill.vocabulary import teacher_divergences
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
from tandem.types import Group, Microbatch, Row

if TYPE_CHECKING:
    from tandem.model.load import ExactModel


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
    batch = pack_batch(groups, config, stage.models.policy.ranks)
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
