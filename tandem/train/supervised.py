"""Learning from fixed data: chats (SFT), and pairs of a chosen and a rejected answer (DPO, reward
models).

Samples 2 i (chosen) and 2 i + 1 (rejected) are pair i: one group, with the prompt as their shared
prefix.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tandem.config.schema import Preference
from tandem.model.forward import batch_logprobs, batch_values, reference_logprobs
from tandem.model.load import ExactModel
from tandem.rl.losses import Metrics, negative_log_likelihood, sequence_means, sequence_sums, total
from tandem.rl.preference import bradley_terry, dpo, ipo, margins
from tandem.train.learner import Learner, Update
from tandem.train.pack import pack, split
from tandem.types import Array, Microbatch, Sample, SamplingDistribution

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
    return [_read_at_end(sample) for sample in answer_pair(pair, chosen, rejected)]


def _read_at_end(sample: Sample) -> Sample:
    """Append a token that is never read, as a target at the last place."""
    tokens = np.append(sample.tokens, 0)
    return replace(sample, tokens=tokens, loss_mask=np.arange(len(tokens)) == len(sample.tokens))


@torch.no_grad()
def scores(scorer: ExactModel, chats: Sequence[Array], tokens_per_microbatch: int) -> list[float]:
    """Return a reward model's score of each chat, tokens int64 [T]."""
    samples = [Sample(tokens=tokens, loss_mask=np.zeros(len(tokens), bool)) for tokens in chats]
    batches = pack([_read_at_end(sample) for sample in samples], tokens_per_microbatch)
    by_chat = split(batches, [batch_values(scorer, batch).numpy() for batch in batches])
    return [float(by_chat[number][0]) for number in range(len(chats))]


def sft_step(policy: Learner, batches: Sequence[Microbatch]) -> Metrics:
    """Make one optimizer step of supervised fine-tuning, token mean over all microbatches."""
    num_tokens, update = sum(len(batch.targets) for batch in batches), Update(policy)
    for batch in batches:
        expected = -(torch.ones(len(batch.targets)) / num_tokens)  # the gradient of the mean below
        logprobs, _ = batch_logprobs(policy.model, batch, UNTEMPERED, expected, entropy=False)
        terms, metrics = negative_log_likelihood(logprobs)
        update.backward(batch, terms.sum() / num_tokens, metrics)
    return update.step()


def preference_step(
    policy: Learner, reference: ExactModel, batches: Sequence[Microbatch], settings: Preference
) -> Metrics:
    """Make one optimizer step of DPO or IPO, mean over pairs."""
    count, update = _num_pairs(batches), Update(policy)
    for batch in batches:
        losses, metrics = pair_loss(policy.model, reference, batch, settings)
        update.backward(batch, losses.sum() / count, metrics)
    return update.step(count=count)


def pair_loss(
    model: ExactModel, reference: ExactModel, batch: Microbatch, settings: Preference
) -> tuple[Tensor, Metrics]:
    """Return the DPO or IPO losses [B / 2] of a microbatch of whole pairs, and sums over pairs.

    With preference.nll_coef the chosen answers' negative log-likelihood is added (iterative RPO,
    arXiv 2404.19733, eq. 1; Llama 3, section 4.1.4).
    """
    sequences = torch.from_numpy(batch.sequences)
    add = sequence_means if settings.length_normalized else sequence_sums
    logprobs = batch_logprobs(model, batch, UNTEMPERED, entropy=False)[0]
    own = add(logprobs, sequences)
    fixed = add(reference_logprobs(reference, batch, UNTEMPERED), sequences)
    margin = margins(own[0::2], own[1::2], fixed[0::2], fixed[1::2])
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
    count, update = _num_pairs(batches), Update(scorer)
    for batch in batches:
        losses, metrics = score_loss(scorer.model, batch)
        update.backward(batch, losses.sum() / count, metrics)
    return update.step(count=count)


def score_loss(model: ExactModel, batch: Microbatch) -> tuple[Tensor, Metrics]:
    """Return the Bradley-Terry losses [B / 2] of a microbatch of whole pairs, and sums over
    pairs."""
    values = batch_values(model, batch)
    return bradley_terry(values[0::2], values[1::2])


def _num_pairs(batches: Sequence[Microbatch]) -> int:
    return sum(len(batch.samples) for batch in batches) // 2
