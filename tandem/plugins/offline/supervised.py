"""Learning from fixed data: chats (SFT), and pairs of a chosen and a rejected answer (DPO, reward
models).

Samples 2 i (chosen) and 2 i + 1 (rejected) are pair i: one group, with the prompt as their shared
prefix.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tandem.config.training import Preference
from tandem.model.forward import batch_logprobs, batch_values, reference_logprobs
from tandem.plugins.offline.pair_losses import bradley_terry, dpo, ipo, margins
from tandem.plugins.offline.reward_model import read_at_end
from tandem.rl.losses import Metrics, negative_log_likelihood, sequence_means, sequence_sums, total
from tandem.trainer.learner import Learner
from tandem.trainer.pack import join, split
from tandem.trainer.ranks import Ranks
from tandem.types import Array, Microbatch, Sample, SamplingDistribution

if TYPE_CHECKING:
    from tandem.model.load import ExactModel


UNTEMPERED = SamplingDistribution()  # fixed data was sampled by nobody

Rendered = tuple[Array, Array]  # tokens, mask of the answer


def answer_pair(pair: int, chosen: Rendered, rejected: Rendered) -> list[Sample]:
    """Return the samples of a pair; their prefix is all that both share before the answer."""
    size = min(int(np.argmax(mask)) for _, mask in (chosen, rejected))
    different = np.flatnonzero(chosen[0][:size] != rejected[0][:size])
    prefix = int(different[0]) if len(different) else size
    return [
        Sample(tokens=tokens, loss_mask=mask, prefix=prefix, group=pair)
        for tokens, mask in (chosen, rejected)
    ]


def scored_pair(pair: int, chosen: Rendered, rejected: Rendered) -> list[Sample]:
    """Return the samples of a pair for a reward model, which reads its score at the last token."""
    return [read_at_end(sample) for sample in answer_pair(pair, chosen, rejected)]


def sft_step(policy: Learner, batches: Sequence[Microbatch]) -> Metrics:
    """Make one optimizer step of supervised fine-tuning, token mean over all microbatches."""
    num_tokens = sum(len(batch.targets) for batch in batches)

    def loss(batch: Microbatch) -> tuple[Tensor, Metrics]:
        expected = -(torch.ones(len(batch.targets)) / num_tokens)  # the gradient of the mean below
        logprobs, _ = batch_logprobs(policy.model, batch, UNTEMPERED, expected, entropy=False)
        terms, metrics = negative_log_likelihood(logprobs)
        return terms.sum() / num_tokens, metrics

    return policy.update(batches, loss)


def preference_step(
    policy: Learner, reference: "ExactModel", batches: Sequence[Microbatch], settings: Preference
) -> Metrics:
    """Make one optimizer step of DPO or IPO, mean over pairs."""
    fixed = reference_answers(reference, batches, policy.ranks)
    return _pair_step(
        policy, batches, lambda b: pair_loss(answers(policy.model, b), b, fixed, settings)
    )


def _pair_step(
    learner: Learner,
    batches: Sequence[Microbatch],
    losses_of: Callable[[Microbatch], tuple[Tensor, Metrics]],
) -> Metrics:
    """Make one optimizer step on losses of pairs [B / 2], mean over all of them."""
    count = sum(len(batch.samples) for batch in batches) // 2

    def loss(batch: Microbatch) -> tuple[Tensor, Metrics]:
        losses, metrics = losses_of(batch)
        return losses.sum() / count, metrics

    return learner.update(batches, loss, count=count)


def pair_metrics(
    policy: Learner, reference: "ExactModel", batches: Sequence[Microbatch], settings: Preference
) -> list[Metrics]:
    """Return the metrics of each microbatch of whole pairs, as sums, without an update."""
    fixed = reference_answers(reference, batches, policy.ranks)
    found = policy.ranks.forward(policy.model, batches, partial(answers, policy.model))
    return [
        pair_loss(torch.from_numpy(logprobs), batch, fixed, settings)[1]
        for logprobs, batch in zip(found, batches, strict=True)
    ]


def answers(model: "ExactModel", batch: Microbatch) -> Tensor:
    """Return the log-probs of the answers' tokens, [N]."""
    return batch_logprobs(model, batch, UNTEMPERED, entropy=False)[0]


def reference_answers(
    reference: "ExactModel", batches: Sequence[Microbatch], ranks: Ranks
) -> dict[int, Array]:
    """Return the reference's log-probs of every answer's tokens, by the answer's number."""
    with reference.adapter_off():  # also in processes that do not run the lambda
        found = ranks.forward(
            reference, batches, lambda batch: reference_logprobs(reference, batch, UNTEMPERED)
        )
    return split(batches, found)


def pair_loss(
    logprobs: Tensor, batch: Microbatch, fixed: Mapping[int, Array], settings: Preference
) -> tuple[Tensor, Metrics]:
    """Return the DPO or IPO losses [B / 2] of a microbatch of whole pairs, and sums over pairs.

    logprobs: of `answers`; fixed: of `reference_answers`. With preference.nll_coef the chosen
    answers' negative log-likelihood is added (iterative RPO, arXiv 2404.19733, eq. 1; Llama 3,
    section 4.1.4).
    """
    sequences = torch.from_numpy(batch.sequences)
    add = sequence_means if settings.length_normalized else sequence_sums
    own = add(logprobs, sequences)
    other = add(torch.from_numpy(join([batch], fixed)[0]), sequences)
    margin = margins(own[0::2], own[1::2], other[0::2], other[1::2])
    if settings.loss == "ipo":
        losses, metrics = ipo(margin, beta=settings.beta)
    else:
        losses, metrics = dpo(margin, beta=settings.beta, label_smoothing=settings.label_smoothing)
    if not settings.nll_coef:
        return losses, metrics
    chosen = -sequence_means(logprobs, sequences)[0::2]
    losses = losses + settings.nll_coef * chosen
    return losses, {**metrics, "loss": total(losses), "nll": total(chosen)}


def reward_model_step(scorer: Learner, batches: Sequence[Microbatch]) -> Metrics:
    """Make one optimizer step of a Bradley-Terry reward model, mean over pairs."""
    return _pair_step(scorer, batches, lambda b: score_loss(batch_values(scorer.model, b)))


def score_metrics(scorer: Learner, batches: Sequence[Microbatch]) -> list[Metrics]:
    """Return the metrics of each microbatch of whole pairs, as sums, without an update."""
    found = scorer.ranks.forward(scorer.model, batches, partial(batch_values, scorer.model))
    return [score_loss(torch.from_numpy(values))[1] for values in found]


def score_loss(values: Tensor) -> tuple[Tensor, Metrics]:
    """Return the Bradley-Terry losses [B / 2] of the scores [B] of whole pairs, and sums over
    pairs."""
    return bradley_terry(values[0::2], values[1::2])
