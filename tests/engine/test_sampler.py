"""Sampling by inverse CDF from addressed uniforms: the right frequencies, and nothing outside the
set."""

import numpy as np
import pytest
import torch

from tandem.engine.sampler import sample
from tandem.model.logprobs import log_distribution
from tandem.runtime.rng import uniforms
from tandem.types import SamplingDistribution

DRAWS = 20_000
LOGITS = torch.tensor([2.0, -1.0, 0.5, 0.4, -6.0, 1.1, -2.5, 0.0])
WHOLE = [{}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 4, "top_p": 0.9}]
WHOLE += [{"vocabulary": 5}, {"vocabulary": 6, "top_p": 0.9, "temperature": 0.7}]
FILTERED = {"top_p": 0.7}, {"top_k": 3}, {"top_k": 5, "top_p": 0.5, "temperature": 1.5}


def draws(how, logits=LOGITS, count=DRAWS):
    keys = np.arange(count).astype(np.uint64)
    uniform = torch.from_numpy(uniforms(keys, np.zeros(count, np.int64)))
    return sample(logits.expand(count, -1).clone(), how, uniform)


@pytest.mark.parametrize("fields", WHOLE, ids=str)
def test_sampling_frequencies_follow_the_distribution(fields):
    how = SamplingDistribution(**fields)
    drawn = draws(how)
    tokens, logprobs = drawn.tokens, drawn.logprobs
    table = log_distribution(LOGITS[None].clone(), how)[0]
    assert torch.equal(logprobs, table[tokens])
    expected = table.exp().double().numpy() * DRAWS
    counts = np.bincount(tokens, minlength=len(LOGITS))
    inside = expected > 0
    assert not counts[~inside].any()
    # chi-square with at most 7 degrees of freedom is above 24.3 once in 1,000; the keys are fixed,
    # so this cannot flake
    assert (((counts - expected) ** 2)[inside] / expected[inside]).sum() < 24.3


@pytest.mark.parametrize("fields", FILTERED, ids=str)
def test_filtered_sampling_reaches_its_set_and_no_other_token(fields):
    how = SamplingDistribution(**fields)
    kept = set(torch.where(~log_distribution(LOGITS[None].clone(), how)[0].isinf())[0].tolist())
    assert set(draws(how).tokens.tolist()) == kept


def test_uniform_selects_the_token_of_its_slice_of_the_cdf():
    logits = torch.tensor([0.5, 0.25, 0.25]).log().expand(6, -1)
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 1 - 2.0**-24])
    assert sample(logits, SamplingDistribution(), uniform).tokens.tolist() == [0, 0, 1, 1, 2, 2]


def test_extreme_uniforms_sample_no_token_of_probability_zero():
    logits = torch.tensor([-torch.inf, -torch.inf, 1.0, 0.3, -torch.inf, -torch.inf]).expand(2, -1)
    extreme = torch.tensor([0.0, 1 - 2.0**-24])
    assert sample(logits, SamplingDistribution(), extreme).tokens.tolist() == [2, 3]
    # where a float32 sum of probabilities is off by more than the last uniform's gap
    large = torch.zeros(2, 100_000)
    large[:, 90_000:] = -torch.inf
    drawn = sample(large, SamplingDistribution(), extreme)
    assert drawn.tokens[0] == 0 and drawn.tokens[1] < 90_000 and drawn.logprobs.isfinite().all()


def test_temperature_zero_takes_the_likeliest_token():
    drawn = draws(SamplingDistribution(temperature=0.0), count=3)
    assert drawn.tokens.tolist() == [0, 0, 0]
    assert torch.allclose(drawn.logprobs, LOGITS.log_softmax(-1)[0].expand(3))
