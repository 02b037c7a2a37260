"""The next token of each row, by inverse CDF from one addressed uniform. Does not know requests or
caches."""

from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from tandem.model.kernels import kernels_of
from tandem.model.logprobs import (
    SeenTokens,
    as_summed,
    is_filtered,
    log_distribution,
    mask_unnamed,
    penalize,
)
from tandem.types import SamplingDistribution
from tandem.weights.hashing import STEP, mix

# Fields of SamplingParams that are equal in sequences sampled in one call.
sampling_key = attrgetter(*(f.name for f in fields(SamplingDistribution)), "top_logprobs")


class SampledTokens(NamedTuple):
    """Sampled tokens int64 [B] with log-probs float32 [B], and the likeliest tokens int64 [B, k]
    with theirs float32 [B, k]."""

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


def sample(
    logits: Tensor,
    sampling: SamplingDistribution,
    uniform: Tensor,
    seen: SeenTokens | None = None,
    top: int = 0,
) -> SampledTokens:
    """Sample a token from each row of logits [B, V] (overwritten) by uniform float32 [B] in [0, 1);
    log-probs are in nats.

    Temperature 0 takes the likeliest token. seen is needed with a repetition penalty.
    """
    logits, kernels = as_summed(logits, sampling), kernels_of(logits)
    draw = None if is_filtered(sampling) else kernels.draw
    if sampling.repetition_penalty != 1.0:
        assert seen is not None, "a repetition penalty needs the tokens seen before"
        penalize(logits, sampling.repetition_penalty, seen)
    if draw is None:
        table = log_distribution(logits, sampling)
        greedy = sampling.temperature == 0
        tokens = table.argmax(-1) if greedy else kernels.inverse_cdf(table, uniform)
        logprobs = table.gather(1, tokens[:, None])[:, 0]
    else:
        mask_unnamed(logits, sampling, None)
        tokens, logprobs = draw(logits, sampling.temperature, uniform)
        table = log_distribution(logits, sampling) if top else logprobs[:, None]
    top_logprobs, top_tokens = kernels.likeliest(table, top)
    return SampledTokens(tokens, logprobs, top_tokens, top_logprobs)


def device_uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Draw the uniforms of runtime.rng, float32 [B], to the same bits where the tensors are.

    keys are its uint64 [B] read as int64, positions are int64 [B].
    """
    z = mix(keys + STEP * (positions + 1))
    return ((z >> 40) & ((1 << 24) - 1)).float() * 2.0**-24  # 24 bits: exact in float32
