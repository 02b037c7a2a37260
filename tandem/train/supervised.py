"""Learning from fixed data: chats (SFT), and pairs of a chosen and a rejected answer (DPO, reward
models).

The samples of pair i are 2 i (chosen) and 2 i + 1 (rejected), one group with the prompt as their
shared prefix.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tandem.config.schema import Preference
from tandem.model.forward import batch_logprobs, batch_values, reference_logprobs
from tandem.model.load import ExactModel
from tandem.model.logprobs import SamplingDistribution
from tandem.rl.losses import Metrics, negative_log_likelihood, sequence_means, sequence_sums, total
from tandem.rl.preference import bradley_terry, dpo, ipo, margins
from tandem.train.learner import Learner
from tandem.train.pack import pack, split
from tandem.types import Array, Microbatch, Sample


def answer_pair(
    pair: int, chosen: tuple[Array, Array], rejected: tuple[Array, Array]
) -> list[Sample]:
    """Two renderings (tokens, mask of the answer) as the samples of a pair; what they share before
    it is their prefix."""
    size = min(int(np.argmax(mask)) for _, mask in (chosen, rejected))
    different = np.flatnonzero(chosen[0][:size] != rejected[0][:size])
    prefix = int(different[0]) if len(different) else size
    return [
        Sample(tokens=tokens, loss_mask=mask, prefix=prefix, group=pair)
        for tokens, mask in (chosen, rejected)
    ]


def scored_pair(
    pair: int, chosen: tuple[Array, Array], rejected: tuple[Array, Array]
) -> list[Sample]:
    """The same for a reward model, which reads its score at the last token."""
    return [_scored(sample) for sample in answer_pair(pair, chosen, rejected)]


def _scored(sample: Sample) -> Sample:
    """A token nobody reads follows the last one, so that there is something to predict where the
    score is read."""
    tokens = np.append(sample.tokens, 0)
    return replace(sample, tokens=tokens, loss_mask=np.arange(len(tokens)) == len(sample.tokens))


@torch.no_grad()
def scores(scorer: ExactModel, chats: Sequence[Array], budget: int) -> list[float]:
    """A reward model's score of each chat, tokens int64 [T]; budget: tokens of a forward pass."""
    samples = [
        _scored(Sample(tokens=tokens, loss_mask=np.zeros(len(tokens), bool))) for tokens in chats
    ]
    batches = pack(samples, budget)
    found = split(batches, [batch_values(scorer, batch).numpy() for batch in batches])
    return [float(found[number][0]) for number in range(len(chats))]


def sft_step(policy: Learner, batches: Sequence[Microbatch]) -> Metrics:
    """One optimizer step of supervised fine-tuning, token mean over all batches."""
    tokens = sum(len(batch.targets) for batch in batches)

    def loss(index: int, batch: Microbatch) -> tuple[Tensor, Metrics]:
        known = -(torch.ones(len(batch.targets)) / tokens)  # what the mean below sends back
        terms, metrics = negative_log_likelihood(
            batch_logprobs(policy.model, batch, SamplingDistribution(), known, entropy=False)[0]
        )
        return terms.sum() / tokens, metrics

    return policy.update(batches, loss)


def preference_step(
    policy: Learner, reference: ExactModel, batches: Sequence[Microbatch], how: Preference
) -> Metrics:
    """One optimizer step of DPO or IPO, mean over pairs."""
    count = _pairs(batches)

    def loss(index: int, batch: Microbatch) -> tuple[Tensor, Metrics]:
        losses, metrics = pair_loss(policy.model, reference, batch, how)
        return losses.sum() / count, metrics

    return policy.update(batches, loss, count=count)


def pair_loss(
    model: ExactModel, reference: ExactModel, batch: Microbatch, how: Preference
) -> tuple[Tensor, Metrics]:
    """DPO or IPO of a microbatch of whole pairs, with the chosen answers' negative log-likelihood
    where it has a weight (iterative RPO, arXiv 2404.19733, eq. 1; Llama 3, section 4.1.4): losses
    [B / 2] and sums over pairs."""
    sequences = torch.from_numpy(batch.sequences)
    add = sequence_means if how.length_normalized else sequence_sums
    logprobs = batch_logprobs(model, batch, SamplingDistribution(), entropy=False)[0]
    own, held = (
        add(logprobs, sequences),
        add(reference_logprobs(reference, batch, SamplingDistribution()), sequences),
    )
    margin = margins(own[0::2], own[1::2], held[0::2], held[1::2])
    if how.loss == "ipo":
        losses, metrics = ipo(margin, beta=how.beta)
    else:
        losses, metrics = dpo(margin, beta=how.beta, label_smoothing=how.label_smoothing)
    if not how.nll_coef:
        return losses, metrics
    chosen = -sequence_means(logprobs, sequences)[0::2]
    losses = losses + how.nll_coef * chosen
    return losses, {**metrics, "loss": total(losses), "nll": total(chosen)}


def reward_model_step(scorer: Learner, batches: Sequence[Microbatch]) -> Metrics:
    """One optimizer step of a Bradley-Terry reward model, mean over pairs."""
    count = _pairs(batches)

    def loss(index: int, batch: Microbatch) -> tuple[Tensor, Metrics]:
        losses, metrics = score_loss(scorer.model, batch)
        return losses.sum() / count, metrics

    return scorer.update(batches, loss, count=count)


def score_loss(model: ExactModel, batch: Microbatch) -> tuple[Tensor, Metrics]:
    """Bradley-Terry of a microbatch of whole pairs: losses [B / 2] and sums over pairs."""
    scores = batch_values(model, batch)
    return bradley_terry(scores[0::2], scores[1::2])


def _pairs(batches: Sequence[Microbatch]) -> int:
    return sum(len(batch.samples) for batch in batches) // 2
