"""Log-probs of the distribution sampled from: chunked = whole, filters = their definition,
gradients = autograd's."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.model.kernels import CPU
from tandem.model.logprobs import CHUNK_BYTES, Head, SeenTokens, log_distribution, token_logprobs
from tandem.types import SamplingDistribution
from tests.support.operators import Operators
from tests.support.tiny import noise

FILTERS = [
    SamplingDistribution(),
    SamplingDistribution(temperature=0.7),
    SamplingDistribution(temperature=1.6),
    # greedy: the distribution at temperature 1, without filters
    SamplingDistribution(temperature=0.0, top_k=3, top_p=0.2),
    SamplingDistribution(top_k=5),
    SamplingDistribution(top_p=0.6),
    SamplingDistribution(temperature=1.3, top_k=12, top_p=0.8),
    SamplingDistribution(min_p=0.1),
    SamplingDistribution(temperature=1.7, top_k=20, top_p=0.95, min_p=0.02),
]
WIDTH = 16


def logits(rows=8, vocabulary=40, seed=0):
    return noise(rows, vocabulary, seed=seed) * 3


def kept_by_definition(row, sampling):
    """The indices that stay, for one row of logits without ties, in Python floats."""
    if sampling.temperature == 0.0:
        return set(range(len(row)))
    weights = [math.exp(float(x) / sampling.temperature) for x in row]
    ranked = sorted(range(len(row)), key=lambda i: -weights[i])
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    kept, mass, total = [], 0.0, math.fsum(weights[i] for i in ranked)
    for index in ranked:
        if mass >= sampling.top_p * total:
            break
        kept.append(index)
        mass += weights[index]
    return {i for i in kept if weights[i] >= sampling.min_p * max(weights)}


def by_definition(row, sampling, forced=None):
    """Log-probs of one row, -inf outside the kept set, in Python floats."""
    kept = kept_by_definition(row, sampling) | ({int(forced)} if forced is not None else set())
    scaled = [float(x) / (sampling.temperature or 1.0) for x in row]
    normalizer = math.log(math.fsum(math.exp(scaled[i]) for i in kept))
    return [scaled[i] - normalizer if i in kept else -math.inf for i in range(len(row))]


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_distribution_follows_the_definition_of_its_filters(sampling, is_forced):
    table = logits()
    forced = table.argmin(-1) if is_forced else None  # outside every filter
    expected = torch.tensor(
        [
            by_definition(row, sampling, None if forced is None else forced[number])
            for number, row in enumerate(table.tolist())
        ]
    )
    found = log_distribution(table, sampling, forced)
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(len(table)))


def test_ties_at_the_edge_are_all_kept():
    tied = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    kept = [False, False, False, False, True]
    assert log_distribution(tied, SamplingDistribution(top_k=2)).isinf().tolist() == [kept]
    assert log_distribution(tied, SamplingDistribution(top_p=0.5)).isinf().tolist() == [kept]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_a_row_does_not_see_the_other_rows(sampling):
    table = logits(rows=33, vocabulary=97)
    whole = log_distribution(table, sampling)
    for rows in (1, 2, 3, 7):
        for start in (0, 5):
            place = slice(start, start + rows)
            assert torch.equal(log_distribution(table[place].clone(), sampling), whole[place])


def case(rows, vocabulary, seed=0):
    hidden, weight = noise(rows, WIDTH, seed=seed), noise(vocabulary, WIDTH, seed=seed + 1) * 0.5
    targets = torch.from_numpy(np.random.default_rng(seed).integers(0, vocabulary, rows))
    return hidden, weight, targets


def test_several_chunks_give_the_bits_of_one_pass():
    vocabulary = 40_000
    rows = 2 * CHUNK_BYTES // (4 * vocabulary) + 7
    hidden, weight, targets = case(rows, vocabulary)
    packed = CPU.pack(weight)
    for sampling in (SamplingDistribution(), SamplingDistribution(temperature=0.8, top_k=50)):
        found, entropy = token_logprobs(Head(hidden, weight, packed), targets, sampling)
        table = log_distribution(CPU.matmul(hidden, packed), sampling, targets)
        assert torch.equal(found, table.gather(1, targets[:, None])[:, 0])
        assert entropy.shape == found.shape and (entropy > 0).all()


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_the_entropy_is_that_of_the_distribution_sampled_from(sampling):
    hidden, weight, targets = case(12, 40)
    _, entropy = token_logprobs(Head(hidden, weight, CPU.pack(weight)), targets, sampling)
    expected = []
    for row, target in zip((hidden @ weight.t()).tolist(), targets, strict=True):
        logprobs = by_definition(row, sampling, target)
        expected.append(-math.fsum(math.exp(x) * x for x in logprobs if x > -math.inf))
    np.testing.assert_allclose(entropy, expected, rtol=1e-4, atol=1e-5)


def tables_in_float64(hidden, weight, targets, sampling, seen):
    """(leaves, log-probs [N, V]) after penalty, temperature and filters, for autograd; -inf outside
    the kept sets. seen: the tokens before each row."""
    leaves = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    raw, penalty = leaves[0] @ leaves[1].t(), sampling.repetition_penalty
    mask = torch.zeros(raw.shape, dtype=torch.bool)
    for row, tokens in enumerate(seen):
        mask[row, tokens] = True
    weakened = torch.where(raw > 0, raw / penalty, raw * penalty)
    scaled = torch.where(mask, weakened, raw) / (sampling.temperature or 1.0)
    if sampling.temperature == 0.0:
        return leaves, scaled.log_softmax(-1)
    ranked, order = scaled.detach().sort(-1, descending=True)
    place = torch.arange(scaled.shape[1])
    probs = ranked.masked_fill(place >= (sampling.top_k or len(place)), -math.inf).softmax(-1)
    kept = (
        (probs > 0)
        & (probs.cumsum(-1) - probs < sampling.top_p)
        & (ranked >= ranked[:, :1] + math.log(sampling.min_p or 1e-300))
    )
    outside = torch.empty_like(kept).scatter_(1, order, ~kept).scatter_(1, targets[:, None], False)
    return leaves, scaled.masked_fill(outside, -math.inf).log_softmax(-1)


SEEN = [list(range(n, 40, n + 2)) for n in range(12)]


def seen_before(start, stop):
    pairs = [(row, token) for row, own in enumerate(SEEN[start:stop]) for token in own]
    return SeenTokens(*torch.tensor(pairs).T)


PENALTY = SamplingDistribution(repetition_penalty=1.4)


@pytest.mark.parametrize(
    ("sampling", "size", "of"),
    [
        *((sampling, (12, 40), of) for of in ([1], [0, 1]) for sampling in FILTERS),
        (PENALTY, (12, 40), [0]),
        (replace(PENALTY, temperature=0.7, top_k=15), (12, 40), [0]),
        (FILTERS[1], (CHUNK_BYTES // 160_000 + 30, 40_000), [0]),  # in several chunks
    ],
    ids=str,
)
def test_gradients_of_log_probs_and_entropies_are_autograds(sampling, size, of):
    """of: 0 for log-probs, 1 for entropies."""
    hidden, weight, targets = case(*size)
    above = [noise(len(targets), seed=3), noise(len(targets), seed=4)]
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    found = token_logprobs(Head(*ours, CPU.pack(weight)), targets, sampling, seen_before)
    torch.autograd.backward([found[n] for n in of], [above[n] for n in of])
    seen = SEEN if sampling.repetition_penalty != 1.0 else ()
    theirs, table = tables_in_float64(hidden, weight, targets, sampling, seen)
    entropies = -(table.exp() * table.masked_fill(table.isinf(), 0.0)).sum(-1)
    expected = table.gather(1, targets[:, None])[:, 0], entropies
    torch.testing.assert_close(found[0], expected[0].float(), rtol=1e-5, atol=1e-5)
    torch.autograd.backward([expected[n] for n in of], [above[n].double() for n in of])
    for one, other in zip(ours, theirs, strict=True):
        # float32 sums over the vocabulary; measured: under 3e-6 of the largest entry, 1.1e-5 with
        # AVX2, with which torch adds up in 8 lanes; 2.1e-5 with 40,000 tokens
        bound = (2e-5 if size == (12, 40) else 5e-5) * float(other.grad.abs().max())
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=0, atol=bound)


def test_no_targets_give_no_logprobs_and_a_gradient_of_zero():
    hidden, weight, _ = case(0, 40)
    weight.requires_grad_()
    head, none = Head(hidden, weight, CPU.pack(weight)), torch.zeros(0, dtype=torch.int64)
    found, _ = token_logprobs(head, none, SamplingDistribution())
    found.sum().backward()
    assert len(found) == 0 and not weight.grad.any()


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_output_projection_gets_no_gradient(frozen):
    hidden = noise(8, WIDTH).requires_grad_()
    weight = noise(40, WIDTH, seed=1).requires_grad_(not frozen)
    head = Head(hidden, weight, CPU.pack(weight))
    logprobs, _ = token_logprobs(head, torch.arange(8), SamplingDistribution())
    with Operators() as run:
        logprobs.sum().backward()
    assert hidden.grad.any() and (weight.grad is None) == frozen
    assert run.products == (2 if frozen else 3)  # the logits again, and each gradient


@pytest.mark.parametrize(
    "sampling",
    [SamplingDistribution(), SamplingDistribution(temperature=0.7, top_k=9)],
    ids=["plain", "filtered"],
)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_expected_gradient_same_bits_other_gradient_its_own(sampling, frozen):
    rng = torch.Generator().manual_seed(0)
    rows, vocabulary, width = 40, 300_000, 8  # several chunks
    weight = torch.randn(vocabulary, width, generator=rng).requires_grad_(not frozen)
    targets = torch.randint(vocabulary, (rows,), generator=rng)
    above = torch.randn(rows, generator=rng)
    start = torch.randn(rows, width, generator=rng)

    def gradients(expected, arriving):
        hidden = start.clone().requires_grad_()
        head = Head(hidden, weight, CPU.pack(weight))
        logprobs, entropy = token_logprobs(head, targets, sampling, None, expected)
        logprobs.backward(arriving)
        of_weight, weight.grad = weight.grad, None
        return logprobs.detach(), entropy.detach(), hidden.grad, of_weight

    for expected, arriving in ((above, above), (above + 1, above), (torch.zeros(rows), above)):
        pairs = zip(gradients(expected, arriving), gradients(None, arriving), strict=True)
        for found, truth in pairs:
            assert (found is None and truth is None and frozen) or torch.equal(found, truth)


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize(("shift", "products"), [(0.0, 0), (1.0, 3)])
def test_expected_gradient_saves_the_second_logits(shift, products):
    hidden, above = torch.randn(6, 8).requires_grad_(), torch.randn(6)
    weight = torch.randn(50, 8).requires_grad_()
    head, expected = Head(hidden, weight, CPU.pack(weight)), above + shift
    logprobs, _ = token_logprobs(head, torch.arange(6), SamplingDistribution(), None, expected)
    with Operators() as ran:
        logprobs.backward(above)
    assert ran.products == products


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_ids_without_a_token_are_as_if_the_vocabulary_had_no_rows_for_them(sampling):
    names = 30
    hidden, weight, targets = case(12, 40)
    targets, above = targets % names, noise(12, seed=3)
    results = []
    for rows, how in ((40, replace(sampling, vocabulary=names)), (names, sampling)):
        mine = [hidden.clone().requires_grad_(), weight[:rows].clone().requires_grad_()]
        found, entropy = token_logprobs(Head(*mine, CPU.pack(mine[1].detach())), targets, how)
        (found * above + entropy).sum().backward()
        assert not mine[1].grad[names:].any()
        results.append([found, entropy, mine[0].grad, mine[1].grad[:names]])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_an_id_without_a_token_that_was_sampled_all_the_same_has_a_finite_log_prob():
    hidden, weight, targets = case(12, 40)
    head, ids = Head(hidden, weight, CPU.pack(weight)), torch.full_like(targets, 35)
    assert (token_logprobs(head, ids, SamplingDistribution(vocabulary=30))[0] > -50).all()
