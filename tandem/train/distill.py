"""On-policy distillation: the student's own episodes, graded token by token by a teacher; no reward
is needed."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tandem.config.schema import Config
from tandem.model.forward import reference_logprobs, teacher_divergences
from tandem.model.load import ExactModel
from tandem.model.logprobs import SamplingDistribution
from tandem.rl.distillation import divergence, sampled_advantages
from tandem.rl.losses import Metrics, total
from tandem.train.learn import (
    Models,
    Observe,
    Step,
    annotate,
    correct,
    merge,
    start,
    token_weights,
    update_policy,
)
from tandem.train.learner import Learner
from tandem.train.pack import join
from tandem.types import Group, Microbatch, Row


def distill(
    student: Learner,
    teacher: ExactModel,
    groups: Sequence[Group],
    config: Config,
    how: SamplingDistribution,
    *,
    version: int,
    exact: bool,
    observe: Observe | None = None,
) -> Row:
    """The step's updates towards the teacher; "teacher_kl" is the mean divergence from it, nats a
    token.

    The exact estimator is that of the tempered distributions, whatever top-k, top-p or min-p left
    out when sampling.
    """
    step = start(groups, config)
    if not step.places:
        return {"num_loss_tokens": 0.0, "skipped_updates": 1.0}
    updates = list(enumerate(step.updates * config.rl.epochs))
    if config.distill.estimator == "exact":
        return merge(
            [_fit_exact(student, teacher, batches, step, config, how) for _, batches in updates]
        )
    annotate(step, Models(policy=student), config.rl, how)
    graded = step.ask(lambda batch: reference_logprobs(teacher, batch, how))
    step.advantages = [
        sampled_advantages(own, held) for own, held in zip(step.proximal, graded, strict=True)
    ]
    metrics = correct(step, config.rl)
    rows = [
        update_policy(student, b, step, config, how, version, exact and number == 0, observe)
        for number, b in updates
    ]
    return {
        **metrics,
        **merge(rows),
        "teacher_kl": -float(np.mean(np.concatenate(step.advantages))),
    }


def _fit_exact(
    student: Learner,
    teacher: ExactModel,
    batches: Sequence[Microbatch],
    step: Step,
    config: Config,
    how: SamplingDistribution,
) -> Metrics:
    weights = join(batches, token_weights(step, batches, config))
    settings = config.distill
    distance = partial(
        divergence, settings.divergence, beta=settings.jsd_beta, top_k=settings.top_k
    )

    def loss(index: int, batch: Microbatch) -> tuple[Tensor, Metrics]:
        terms = teacher_divergences(student.model, teacher, batch, how.temperature, distance)
        return (terms * torch.from_numpy(weights[index])).sum(), {"teacher_kl": total(terms)}

    return student.update(batches, loss)
