"""Tokens of uniforms and the edge of top-p: against float64, alone and among other rows, and at the
ends of the distribution."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tandem.engine.sampler import sample
from tandem.model.logprobs import log_distribution
from tandem.plugins.triton.plans import TRITON
from tandem.plugins.triton.vocabulary import BLOCK, inverse_cdf, top_p_edge
from tandem.types import SamplingDistribution
from tests.support.kernels import DEVICE, random, same_bits, triton_everywhere

LAST = 1 - 2.0**-24  # the largest uniform
# of three blocks and, on a GPU, of 13
SIZES = pytest.mark.parametrize("size", [1, 7, 997, 50_257 if DEVICE == "cuda" else 9_001])
# rows of 33: alone, and among others at either end of a batch
ALONE = range(33) if DEVICE == "cuda" else (0, 1, 17, 32)
PARTS = [slice(n, n + 1) for n in ALONE] + [slice(n) for n in (2, 5)] + [slice(28, 33)]
ERROR = 2e-6  # of a sum of float32 probabilities


def logprobs_of(size, rows=33, spread=2.0):
    """Log-probs of flat rows, peaked ones, and some with filtered tokens."""
    logits = spread * random(size, rows, size)
    logits[1::4] = 0.0
    if size > 1:
        logits[2::4, : size // 2] = -torch.inf
        logits[3::4, size // 2 :] = -torch.inf
    return logits.log_softmax(-1)


def uniforms_of(rows):
    uniform = torch.rand(rows, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    uniform[:2], uniform[-2:] = 0.0, LAST
    return uniform


def slices(logprobs):
    """Begin and end of each token's slice of [0, 1], float64."""
    probs = logprobs.double().exp()
    ends = probs.cumsum(-1) / probs.sum(-1, keepdim=True)
    return ends - probs / probs.sum(-1, keepdim=True), ends


def ranked_of(logprobs):
    return logprobs.sort(-1, descending=True).values


@SIZES
def test_a_uniform_lies_in_the_slice_of_its_token(size):
    logprobs, uniform = logprobs_of(size), uniforms_of(33)
    token = inverse_cdf(logprobs, uniform)[:, None]
    begin, end = (edge.gather(1, token)[:, 0] for edge in slices(logprobs))
    assert logprobs.gather(1, token).isfinite().all()
    assert (uniform > begin - ERROR).all() and (uniform < end + ERROR).all()


def test_the_one_token_that_is_left_is_taken_wherever_it_is():
    size = 2 * BLOCK + 3
    for place in (0, BLOCK - 1, BLOCK, size - 1):
        logprobs = torch.full((3, size), -torch.inf).to(DEVICE)
        logprobs[:, place] = 0.0
        uniform = torch.tensor([0.0, 0.5, LAST]).to(DEVICE)
        assert inverse_cdf(logprobs, uniform).tolist() == [place] * 3
        assert top_p_edge(ranked_of(logprobs), 0.9).tolist() == [[0.0]] * 3


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_of_nans_takes_a_token_of_the_vocabulary():
    rows = torch.full((2, 5 * BLOCK - 2), torch.nan).to(DEVICE)
    tokens = inverse_cdf(rows, torch.tensor([0.0, LAST]).to(DEVICE))
    assert (tokens < rows.shape[1]).all() and (tokens >= 0).all()


@SIZES
def test_a_row_has_the_same_token_alone_and_in_any_batch(size):
    """Uniforms at the edges of slices: the last bit of a sum decides."""
    logprobs = logprobs_of(size)
    chosen = torch.arange(33, device=DEVICE)[:, None] * 7919 % size
    uniform = slices(logprobs)[0].gather(1, chosen)[:, 0].float().clamp(max=LAST)
    whole = inverse_cdf(logprobs, uniform)
    for part in PARTS:
        assert torch.equal(inverse_cdf(logprobs[part], uniform[part]), whole[part]), part
    assert torch.equal(inverse_cdf(logprobs.flip(0), uniform.flip(0)).flip(0), whole)


@SIZES
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999])
def test_the_edge_is_where_the_likeliest_tokens_reach_top_p(size, top_p):
    logprobs = logprobs_of(size)
    edge = top_p_edge(ranked_of(logprobs), top_p)
    probs = logprobs.double().exp() / logprobs.double().exp().sum(-1, keepdim=True)
    before, reached = (
        probs.masked_fill(~kept, 0.0).sum(-1) for kept in (logprobs > edge, logprobs >= edge)
    )
    assert (logprobs == edge).any(-1).all()
    assert (before < top_p + ERROR).all() and (reached > top_p - ERROR).all()


@SIZES
def test_an_edge_has_the_same_bits_alone_and_in_any_batch(size):
    """Near the end tokens are so improbable that the last bit of a sum moves the edge."""
    ranked, top_p = ranked_of(logprobs_of(size)), 0.9999
    whole = top_p_edge(ranked, top_p)
    for part in PARTS:
        assert same_bits(top_p_edge(ranked[part], top_p), whole[part]), part


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingDistribution(temperature=0.7),
        SamplingDistribution(top_p=0.8),
        SamplingDistribution(temperature=1.3, top_k=50, top_p=0.9),
        SamplingDistribution(top_p=0.9, min_p=0.01, repetition_penalty=1.0),
        SamplingDistribution(temperature=0.0),
    ],
    ids=str,
)
def test_the_engine_samples_a_row_alone_as_among_others_with_the_trainer_s_log_probs(sampling):
    logits, uniform = 3 * random(5, 33, 997), uniforms_of(33)
    with triton_everywhere():
        whole = sample(logits, sampling, uniform)
        table = log_distribution(logits, sampling, whole.tokens)
        for rows in (1, 2, 5):
            part = sample(logits[-rows:], sampling, uniform[-rows:])
            assert torch.equal(part.tokens, whole.tokens[-rows:])
            assert same_bits(part.logprobs, whole.logprobs[-rows:])
    assert same_bits(whole.logprobs, table.gather(1, whole.tokens[:, None])[:, 0])
    assert whole.logprobs.isfinite().all()


def test_of_equal_tokens_the_first_are_the_likeliest():
    table = torch.zeros(3, 5000).to(DEVICE)
    table[:, 40:60] = 1.0
    with triton_everywhere():
        values, tokens = TRITON.likeliest(table, 22)
    assert tokens.tolist() == [[*range(40, 60), 0, 1]] * 3
    assert values.tolist() == [[1.0] * 20 + [0.0] * 2] * 3


def test_filters_keep_what_they_keep_on_the_cpu():
    logits, sampling = 3 * random(6, 9, 997), SamplingDistribution(top_k=90, top_p=0.9)
    with triton_everywhere():
        found = log_distribution(logits, sampling)
    expected = log_distribution(logits.cpu(), sampling)
    assert torch.equal(found.isinf().cpu(), expected.isinf())
    assert found.isfinite().sum(-1).min() > 1 and math.isfinite(found.amax())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
